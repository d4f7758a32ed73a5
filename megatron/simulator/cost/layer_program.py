# SPDX-License-Identifier: Apache-2.0
"""How a program runs a layer: its kernels, what it fuses, FP8, what it computes again, and the host's work.

The segments of layer_operations.py are those of our program. Other people's runs do the same work by other kernels;
:func:`as_run` writes a layer down as they would. Bytes are counted operation by operation, not fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from megatron.formulas.strategy import Shape
from megatron.simulator.cost.operations import BF16, FP32, Parts, Segment, memory
from megatron.simulator.cost.seconds import attention_named
from megatron.simulator.cost.trace import Kernel

Way = Literal["ours", "eager", "compiled", "fused"]

# Bytes that PyTorch's operations move, one after the other, over those of one kernel (forward, backward). RMSNorm in
# fp32: widen 6, square 8, mean 4, scale 8, narrow 6, weight 4, where a kernel has 4; its gradient about 60 for 10.
# SwiGLU: 4 and 6 for 6; 12 and 6 for 10. Megatron-core's cross-entropy moves 46 and 26, PyTorch's 18 and 22.
RMS_NORM, SWIGLU, CROSS_ENTROPY = (9.0, 6.0), (10 / 6, 18 / 10), (18 / 46, 22 / 26)
FUSED_CROSS_ENTROPY = (6 / 46, 4 / 26)  # one kernel a pass: torch.compile's, Triton's, Transformer Engine's
# A ring's outputs merged by one kernel, where ours are by several (attention_operations.py, ``merges``).
OWN_MERGES = {"widen": 10 / 12, "merge_output": 10 / 30}
# A tensor that is cast for an FP8 product: read in bf16, written as it is and transposed.
CAST_BYTES = BF16 + 2
# What the host launches for a layer's forward pass, hidden behind the GPU unless that is faster: PyTorch's operations
# with FSDP's hooks; assumed, as no record is short enough to tell. For the backward pass twice.
LAUNCHES = {"eager": 60, "compiled": 30, "fused": 40}
OWN_ENDS, OWN_OPTIMIZER = (10, 47), (24, 19)  # ours: embedding, loss; optimizer, a layer and beside them


@dataclass(frozen=True)
class Program:
    """Which program runs the layers.

    Attributes:
        runs: ``ours``; ``eager``: PyTorch's operations one by one; ``compiled``: torch.compile; ``fused``: Transformer
            Engine's and apex' kernels.
        attention: the kernel that runs tiles, by its name in a machine's ``kernels``; empty: the machine's.
        fp8: the linear layers of all layers are in FP8; not the output layer.
        overlap: TP's transfers of the forward pass travel beside its products, and a pipeline's messages beside work
            where there are virtual stages, as Transformer Engine and Megatron-LM can.
        gradients: bytes of one of the model's gradients, as it is kept and summed over ranks.
        again: share of the forward products that the backward pass computes again, with all that lies between them.
    """

    runs: Way = "ours"
    attention: str = ""
    fp8: bool = False
    overlap: bool = False
    again: float = 0.0
    gradients: int = FP32

    def launches(self, own: float, *, backward: bool = False) -> float:
        """What the host launches for a pass of a layer; ``own``: for our program."""
        return own if self.runs == "ours" else LAUNCHES[self.runs] * (2 if backward else 1)

    def optimizer_launches(self, layers: int) -> float:
        """The same of a step's end."""
        return OWN_OPTIMIZER[0] * layers + OWN_OPTIMIZER[1] if self.runs == "ours" else 0.0


OURS = Program()
TE = ("ours", "fused")  # whose FP8 layers are Transformer Engine's


def as_run(segments: Iterable[Segment], shape: Shape, program: Program, *, linear: bool = True) -> list[Segment]:
    """The segments with the kernels of ``program``. ``linear``: of a layer, whose products may be in FP8."""
    found = list(segments)
    if program == OURS:
        return found
    if program.overlap and linear:
        found = _beside_products(found)
    found = [
        replace(part, kernels=tuple(one for kernel in part.kernels for one in _kernels(kernel, shape, program, linear)))
        for part in found
    ]
    return [_gathered_in_fp8(part) for part in found] if program.fp8 and linear and program.runs in TE else found


def _gathered_in_fp8(part: Segment) -> Segment:
    """What TP gathers, Transformer Engine casts before; what it sums stays in bf16."""
    if not any(transfer.axis == "tp" and transfer.kind == "all_gather" for transfer in part.transfers):
        return part
    halved = (
        replace(one, bytes=one.bytes / BF16) if one.axis == "tp" and one.kind == "all_gather" else one
        for one in part.transfers
    )
    return replace(part, transfers=tuple(halved))


def computed_again(forward: Iterable[Segment], program: Program) -> list[Segment]:
    """What selective recompute by operation adds to a backward pass: all kernels bound by memory, a share of the
    products, no attention and no transfer."""
    if not program.again:
        return []
    found = []
    for part in forward:
        plain = tuple(kernel for kernel in part.kernels if kernel.kind == "memory")
        products = tuple(kernel for kernel in part.kernels if kernel.kind == "gemm")
        found += [Segment(plain, count=part.count)] if plain else []
        found += [Segment(products, count=part.count * program.again)] if products else []
    return found


def host_bound(parts: Parts, seconds: float) -> Parts:
    """``parts`` of a pass of a layer; as ``launching`` what a host that needs ``seconds`` for it makes the GPU wait."""
    waited = seconds - sum(parts.values())
    return {**parts, "launching": waited} if waited > 0 else parts


def _kernels(kernel: Kernel, shape: Shape, program: Program, linear: bool) -> tuple[Kernel, ...]:
    if kernel.kind == "attention":
        return (replace(kernel, name=attention_named(program.attention)) if program.attention else kernel,)
    if kernel.name == "main_grad" and program.runs != "ours":
        return ()  # the product adds to it (fused), or the gradient is summed when its shards are (FSDP)
    if kernel.kind == "memory":
        return (replace(kernel, bytes=kernel.bytes * _traffic(kernel, shape, program.runs)),)
    _, m, n, k = kernel.shape
    sums = program.runs == "fused" and kernel.name.endswith("_wgrad")
    out = (2 * program.gradients if sums else BF16) * m * n
    if not (program.fp8 and linear):
        return (replace(kernel, bytes=BF16 * (m * k + n * k) + out),) if sums else (kernel,)
    # A forward product casts its input, and its weight, which Transformer Engine keeps from one micro-batch to the
    # next; the input gradient's product casts its gradient; the weight gradient's finds both cast.
    weight = 0.0 if kernel.backward or program.runs == "fused" else n * k
    cast = 0.0 if kernel.name.endswith("_wgrad") else m * k + weight
    product = replace(kernel, itemsize=1, bytes=m * k + n * k + out)
    return (product, memory("cast", CAST_BYTES * cast, backward=kernel.backward)) if cast else (product,)


def _traffic(kernel: Kernel, shape: Shape, runs: Way) -> float:
    """Bytes that the program moves for one that ours moves."""
    if runs == "ours":
        return 1.0
    if kernel.name in OWN_MERGES:
        return OWN_MERGES[kernel.name]
    if kernel.name == "cross_entropy":
        return (CROSS_ENTROPY if runs == "eager" else FUSED_CROSS_ENTROPY)[kernel.backward]
    if runs != "eager":
        return 1.0
    if kernel.name == "norm" and not shape.layer_norm:  # PyTorch's LayerNorm is one kernel
        return RMS_NORM[kernel.backward]
    if kernel.name == "activation" and shape.gated:
        return SWIGLU[kernel.backward]
    return 1.0


def _beside_products(segments: list[Segment]) -> list[Segment]:
    """What TP gathers travels beside the product that takes it, what it scatters beside the one that made it."""
    found: list[Segment] = []
    gathers: Segment | None = None
    for part in segments:
        alone = not part.kernels and bool(part.transfers) and part.transfers[0].axis == "tp"
        if alone and part.transfers[0].kind == "all_gather" and gathers is None:
            gathers = part
        elif gathers is not None and _multiplies(part) and part.count == gathers.count:
            found.append(replace(part, transfers=gathers.transfers + part.transfers))
            gathers = None
        elif alone and found and _multiplies(found[-1]) and found[-1].count == part.count:
            found[-1] = replace(found[-1], transfers=found[-1].transfers + part.transfers)
        else:
            found.append(part)
    return found + ([gathers] if gathers is not None else [])


def _multiplies(part: Segment) -> bool:
    return any(kernel.kind == "gemm" for kernel in part.kernels)
