# SPDX-License-Identifier: Apache-2.0
"""Differences between programs that run the same layer: fused kernels, FP8, recompute, launches by the host.

The segments of layer_operations.py describe this program. :func:`as_run` converts them to segments of other programs,
for published runs. Bytes are counted operation by operation, not fitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from megatron.formulas.strategy import Shape
from megatron.simulator.cost.operations import BF16, COUNTED, FP32, Parts, Segment, memory
from megatron.simulator.cost.seconds import attention_named
from megatron.simulator.cost.trace import Kernel

Runs = Literal["ours", "eager", "compiled", "fused"]

# Ratio of the bytes that PyTorch's separate operations move to one fused kernel's (forward, backward). RMSNorm in fp32:
# cast up 6, square 8, mean 4, scale 8, cast down 6, weight 4, where a fused kernel moves 4; its gradient about 60
# instead of 10. SwiGLU: 4 + 6 instead of 6; 12 + 6 instead of 10. Megatron-core's cross-entropy moves 46 and 26,
# PyTorch's 18 and 22.
RMS_NORM, SWIGLU, CROSS_ENTROPY = (9.0, 6.0), (10 / 6, 18 / 10), (18 / 46, 22 / 26)
FUSED_CROSS_ENTROPY = (6 / 46, 4 / 26)  # one kernel per pass: torch.compile's, Triton's, Transformer Engine's
# Other programs cast the first output before they merge others into it (ring_operations.py, ``merges``).
WIDEN = 10 / 4
# A tensor is cast for an FP8 product: read in bf16, written in FP8 as it is and transposed.
CAST_BYTES = BF16 + 2
# Launches for a layer's forward pass, twice as many for backward: PyTorch's operations with FSDP's hooks. The GPU waits
# for them only if it is faster than the host. The numbers are assumed: no published run is short enough to show them.
LAUNCHES = {"eager": 60, "compiled": 30, "fused": 40}
# Launches of this program: (embedding, loss); (optimizer for each layer, optimizer in addition).
OWN_ENDS, OWN_OPTIMIZER = (10, 47), (24, 19)


@dataclass(frozen=True)
class Program:
    """The program that runs the layers."""

    # `ours`: this program; `eager`: PyTorch's separate operations; `compiled`: torch.compile; `fused`: kernels of
    # Transformer Engine and apex
    runs: Runs = "ours"
    attention: str = ""  # the attention kernel, by its name in a machine's `kernels`; empty: the machine's choice
    fp8: bool = False  # the linear layers of all layers run in FP8, but not the output layer
    # TP's transfers overlap the products of the forward pass, and with virtual stages a pipeline's messages overlap
    # compute, as in Transformer Engine and Megatron-LM
    overlap: bool = False
    # share of the forward matrix products that backward computes again, with all operations between them
    again: float = 0.0
    gradients: int = FP32  # bytes of a number of the model's gradients, in memory and in transfers
    states: float = (
        1.0  # time of the kernels between the projections of a linear-attention or SSM layer, over this program's
    )

    def launches(self, own: float, *, backward: bool = False) -> float:
        """Launches for a pass of a layer; ``own``: the number that this program makes."""
        return own if self.runs == "ours" else LAUNCHES[self.runs] * (2 if backward else 1)

    def optimizer_launches(self, layers: int) -> float:
        """Launches of the optimizer step, where they are known."""
        return OWN_OPTIMIZER[0] * layers + OWN_OPTIMIZER[1] if self.runs == "ours" else 0.0


OURS = Program()
TE = ("ours", "fused")  # programs whose FP8 layers are Transformer Engine's


def as_run(segments: Iterable[Segment], shape: Shape, program: Program, *, linear: bool = True) -> list[Segment]:
    """The segments with the kernels of ``program``. ``linear``: they belong to a layer, whose products may be FP8."""
    segments = list(segments)
    if program == OURS:
        return segments
    if program.overlap and linear:
        segments = _overlap_products(segments)
    segments = [
        replace(part, kernels=tuple(one for kernel in part.kernels for one in _kernels(kernel, shape, program, linear)))
        for part in segments
    ]
    return [_gathered_in_fp8(part) for part in segments] if program.fp8 and linear and program.runs in TE else segments


def _gathered_in_fp8(part: Segment) -> Segment:
    """Transformer Engine casts to FP8 before TP's all-gathers; its reductions stay in bf16."""
    if not any(transfer.axis == "tp" and transfer.kind == "all_gather" for transfer in part.transfers):
        return part
    halved = (
        replace(one, bytes=one.bytes / BF16) if one.axis == "tp" and one.kind == "all_gather" else one
        for one in part.transfers
    )
    return replace(part, transfers=tuple(halved))


def computed_again(forward: Iterable[Segment], program: Program) -> list[Segment]:
    """What selective recompute by operation adds to a backward pass.

    These are all kernels bound by memory and a share of the products, but no attention and no transfer.
    """
    if not program.again:
        return []
    added = []
    for part in forward:
        plain = tuple(kernel for kernel in part.kernels if kernel.kind == "memory")
        products = tuple(kernel for kernel in part.kernels if kernel.kind == "gemm")
        added += [Segment(plain, count=part.count)] if plain else []
        added += [Segment(products, count=part.count * program.again)] if products else []
    return added


def host_bound(parts: Parts, seconds: float) -> Parts:
    """``parts`` of a pass, plus ``launching``: the time that the GPU waits if the host needs ``seconds`` to launch."""
    waited = seconds - sum(parts.values())
    return {**parts, "launching": waited} if waited > 0 else parts


def _kernels(kernel: Kernel, shape: Shape, program: Program, linear: bool) -> tuple[Kernel, ...]:
    if kernel.kind == "attention":
        return (replace(kernel, name=attention_named(program.attention)) if program.attention else kernel,)
    if kernel.name == COUNTED:
        size, flops = kernel.bytes * program.states, kernel.flops * program.states
        return (replace(kernel, bytes=size, flops=flops),) if program.states else ()
    if kernel.name == "main_grad" and program.runs != "ours":
        return ()  # the product itself adds to it (fused), or the reduce-scatter does (FSDP)
    if kernel.kind == "memory":
        return (replace(kernel, bytes=kernel.bytes * _traffic(kernel, shape, program.runs)),)
    _, m, n, k = kernel.shape
    weight_grad = kernel.name.endswith("_wgrad")
    out = (2 * program.gradients if weight_grad and program.runs == "fused" else BF16) * m * n
    if not (program.fp8 and linear):
        return (replace(kernel, bytes=BF16 * (m * k + n * k) + out),) if weight_grad else (kernel,)
    # A forward product casts its input and its weight; Transformer Engine keeps the cast weight between micro-batches.
    # The input gradient's product casts its gradient; the weight gradient's product uses both casts again.
    weight = 0.0 if kernel.backward or program.runs == "fused" else n * k
    cast = 0.0 if weight_grad else m * k + weight
    product = replace(kernel, itemsize=1, bytes=m * k + n * k + out)
    return (product, memory("cast", CAST_BYTES * cast, backward=kernel.backward)) if cast else (product,)


def _traffic(kernel: Kernel, shape: Shape, runs: Runs) -> float:
    """Ratio of the bytes that the program moves to those that this program moves."""
    if runs == "ours":
        return 1.0
    if kernel.name == "widen":
        return WIDEN
    if kernel.name == "cross_entropy":
        return (CROSS_ENTROPY if runs == "eager" else FUSED_CROSS_ENTROPY)[kernel.backward]
    if runs != "eager":
        return 1.0
    if kernel.name == "norm" and not shape.layer_norm:  # PyTorch's LayerNorm is one kernel
        return RMS_NORM[kernel.backward]
    if kernel.name == "activation" and shape.gated:
        return SWIGLU[kernel.backward]
    return 1.0


def _overlap_products(segments: list[Segment]) -> list[Segment]:
    """TP's all-gathers overlap the product that reads them, its reduce-scatters the product that makes their input."""
    result: list[Segment] = []
    gathers: Segment | None = None
    for part in segments:
        alone = not part.kernels and bool(part.transfers) and part.transfers[0].axis == "tp"
        if alone and part.transfers[0].kind == "all_gather" and gathers is None:
            gathers = part
        elif gathers is not None and _multiplies(part) and part.count == gathers.count:
            result.append(replace(part, transfers=gathers.transfers + part.transfers))
            gathers = None
        elif alone and result and _multiplies(result[-1]) and result[-1].count == part.count:
            result[-1] = replace(result[-1], transfers=result[-1].transfers + part.transfers)
        else:
            result.append(part)
    return result + ([gathers] if gathers is not None else [])


def _multiplies(part: Segment) -> bool:
    return any(kernel.kind == "gemm" for kernel in part.kernels)
