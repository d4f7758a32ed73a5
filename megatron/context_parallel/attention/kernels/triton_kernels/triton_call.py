# SPDX-License-Identifier: Apache-2.0
"""Launches of the Triton attention kernels, with all their arguments.

The kernels are in triton_forward.py and triton_backward.py; triton_tiles.py makes their ranges. With
``TRITON_INTERPRET=1``, set before Triton is first imported, they run on CPU tensors, slowly, for tests.

Sinks (a learned logit for each head, without a value) need no kernel: after all tiles, ``out *= sigmoid(lse - sink)``
and ``lse = logaddexp(lse, sink)``. The backward pass uses this out and lse, and the gradient of a head's sink
is ``-sum(exp(sink - lse) * delta)`` over its queries.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.triton_kernels.triton_tiles import (
    SIDES,
    Side,
    Sizes,
    chosen,
    in_groups,
    pack,
    places,
    plain_steps,
    walk,
    walk_numbers,
    walk_sizes,
)
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.tiles import Tiles
from megatron.context_parallel.positions.position_dropout import LANES, Dropout
from megatron.decisions.block_sizes import SHORT, Blocks, BlockTable, Pass, passes
from megatron.platform.hooks import replaceable
from megatron.platform.streams import to_device

OPTIONS = {"enable_fp_fusion": True}  # fused multiply-add; Triton is about to change its default


@dataclass(frozen=True)
class Launch:
    """A kernel with all its arguments, which can be run on a GPU or compiled without one.

    ``scratch``: it makes descriptors, for which Triton allocates memory.
    """

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]
    sizes: Blocks
    scratch: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of the compiler."""
        sizes = self.sizes
        return {"num_warps": sizes.warps, "num_stages": sizes.stages, "maxnreg": sizes.registers, **OPTIONS}

    @replaceable
    def run(self) -> None:
        """Enqueue the kernel on the current stream of the tensors' GPU."""
        device = next(x.device for x in self.arguments.values() if isinstance(x, Tensor))
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            copy_context().run(self._start)

    def _start(self) -> None:
        if self.scratch:  # a setting of this context alone
            import triton

            triton.set_allocator(_scratch)
        self.kernel[self.grid](**self.arguments, **self.options)


DESCRIBED = {"queries": ("k", "v"), "keys": ("q", "dout"), "backward": ("q", "dout")}
LOG2E = 1.4426950408889634


def delta(out_SBHD: Tensor, dout_SBHD: Tensor) -> Tensor:
    """``sum(dout * out)`` over the last dimension, fp32 [s, b, heads], of the final output."""
    s, b, h, d = out_SBHD.shape
    total = torch.empty(s, b, h, dtype=torch.float32, device=out_SBHD.device)
    tensors = {"out": out_SBHD, "dout": dout_SBHD, "delta": total}
    sizes = {"rows": s, "HEADS": h, "VALUE": d, "VALUE_BLOCK": _power(d), "BLOCK": 32}
    arguments = {**tensors, **_strides(tensors), **sizes, "WIDE": _wide(32, out_SBHD, dout_SBHD)}
    Launch(_functions()["delta"], (-(-s // 32), b * h), arguments, Blocks(32, 32, 4, 1)).run()
    return total


def merge(out_SBHD: Tensor, lse_SBH: Tensor, tile_out_SBHD: Tensor, tile_lse_SBH: Tensor) -> Tensor:
    """Merge a tile into out and lse: see `sums.merged`. Returns out, which is in place if it is fp32."""
    s, b, h, d = out_SBHD.shape
    to = out_SBHD if out_SBHD.dtype == torch.float32 else torch.empty_like(out_SBHD, dtype=torch.float32)
    tensors = {"out": out_SBHD, "tile_out": tile_out_SBHD, "to": to}
    numbers = {"lse": lse_SBH, "tile_lse": tile_lse_SBH}
    sizes = {"rows": s, "HEADS": h, "VALUE": d, "VALUE_BLOCK": _power(d), "BLOCK": 32}
    arguments = {**tensors, **numbers, **_strides(tensors | numbers), **sizes, "WIDE": _wide(32, *tensors.values())}
    Launch(_functions()["merge"], (-(-s // 32), b * h), arguments, Blocks(32, 32, 4, 1)).run()
    return to


@dataclass(frozen=True)
class Call:
    """The common arguments of forward and backward; makes the launches.

    Attributes:
        q: [s, b, heads, d]; k: [t, b, kv_heads, d]; v: [t, b, kv_heads, dv]. Any strides.
        scale, mask, slopes, softcap, dropout, measured: see `kernels.base.Scores`.
        capability: of the GPU, 80, 90, ..; None: the interpreter. Default (-1): that of the tensors' device.
        fixed: block sizes by pass, instead of those that decisions/ chooses, to measure and compare them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    mask: Mask | None = None
    slopes: Tensor | None = None
    softcap: float | None = None
    dropout: Dropout | None = None
    measured: BlockTable | None = None
    capability: int | None = -1
    fixed: Mapping[Pass, Blocks] | None = None

    def __post_init__(self) -> None:
        (_, b, h, d), (t, _, hk, _) = self.q.shape, self.k.shape
        if self.k.shape != (t, b, hk, d) or self.v.shape[:3] != (t, b, hk) or h % hk:
            shapes = (list(x.shape) for x in (self.q, self.k, self.v))
            raise ValueError("q {} does not fit k {}, v {} as [s, b, heads, d]".format(*shapes))
        if not self.scale > 0:
            raise ValueError(f"the scale must be above 0, not {self.scale}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"the soft-cap must be above 0, not {self.softcap}")
        if self.slopes is not None and self.slopes.shape != (h,):
            raise ValueError(f"slopes has shape {list(self.slopes.shape)}: give one number for each of {h} heads")
        if self.dropout is not None and len(self.dropout.samples) != b:
            raise ValueError(
                f"dropout.samples has {len(self.dropout.samples)} numbers, not {b}: give one for each sample"
            )
        if b * h >= 2**16:
            raise ValueError(f"{b} samples of {h} heads exceed the size of a GPU's grid: use a smaller batch")
        if self.capability == -1:
            major, minor = (0, 0) if interpreted() else torch.cuda.get_device_capability(self.q.device)
            object.__setattr__(self, "capability", 10 * major + minor or None)

    def forward(self, tiles: Tiles, out: Tensor, lse: Tensor, *, first: bool = False) -> Launch:
        """The launch that merges ``tiles`` into ``out`` [s, b, heads, dv] and ``lse`` [s, b, heads], both fp32.

        ``first``: it writes both without reading them, and out may have the dtype of q; see `written`.
        """
        tensors = {"q": self.q, "k": self.k, "v": self.v, "out": out, "lse": lse}
        dtype = self.q.dtype if first else None
        _check_sums({"out": (out, (*self.q.shape[:3], self.v.size(3)))}, dtype)
        _check_sums({"lse": (lse, self.q.shape[:3])})
        (bits,) = self._bits(tiles, ["q"])
        return self._launch("forward", tiles, tensors, bits, self._by_position(tiles), first)

    def forward_launches(self, tiles: Tiles, out: Tensor, lse: Tensor, *, first: bool = False) -> list[Launch]:
        """The launches that do what `forward` does: that one, or one for edges and then one for plain ranges."""
        plain = self._plain(tiles, out, lse) if self.specialised(tiles) else None
        if plain is None:
            return [self.forward(tiles, out, lse, first=first)]
        sizes = replace(plain.sizes, warps=plain.sizes.block // 16, stages=2)
        edges = replace(self, fixed={"forward": sizes}).forward(tiles, out, lse, first=first)
        return [replace(edges, arguments={**edges.arguments, "PLAIN": False}), plain]

    def specialised(self, tiles: Tiles) -> bool:
        """Whether plain ranges have a kernel of their own, which adds to sums in fp32."""
        sizes = (self.q.size(3), self.v.size(3))
        return (
            "plain" in self.passes()
            and self.capability in (None, 90)
            and self.slopes is None and self.softcap is None and self.dropout is None
            and all(size >= 16 and size == _power(size) <= 128 for size in sizes)
            and all(_describable(x) for x in (self.q, self.k, self.v))
            and tiles.pairs >= SHORT * self.q.size(0)
        )  # fmt: skip

    def _plain(self, tiles: Tiles, out: Tensor, lse: Tensor) -> Launch | None:
        (s, b, h, d), hk = self.q.shape, self.k.size(2)
        sizes, how = self._chosen("plain", tiles)
        found = plain_steps(tiles, how, self.q.device)
        if found is None:
            return None
        tensors, keys = {"q": self.q, "out": out, "lse": lse}, {"k": self.k, "v": self.v}
        arguments = {
            **tensors,
            **_strides(tensors),
            **{name: _descriptor(x, sizes.step) for name, x in keys.items()},
            **{f"{name}_s{at}": x.stride(n) for name, x in keys.items() for at, n in (("b", 1), ("h", 2))},
            "blocks": found[0],
            "steps": found[1],
            "q_rows": s,
            "factor": self.scale * LOG2E,
            "HEADS": h,
            "GROUP": h // hk,
            "HEAD": d,
            "VALUE": self.v.size(3),
            "BLOCK": sizes.block,
            "STEP": sizes.step,
            "STAGES": sizes.stages,
            "WIDE": _wide(sizes.block, self.q, out),
            "PRECISION": "interpreted" if self.capability is None else "ieee",
        }
        return Launch(_functions()["plain"], (len(found[0]), b * h), arguments, sizes, scratch=True)

    def written(self, tiles: Tiles, *, backward: bool = False) -> set[Side]:
        """The sides whose results a launch for these tiles writes completely: each block of rows is in a tile."""
        output: Pass = "plain" if self.specialised(tiles) else "forward"
        kernels = set(self.passes()) & {"queries", "keys", "backward"} if backward else {output}
        found = [self._chosen(which, tiles)[1] for which in kernels]
        return {how[0] for how in found if len(walk_numbers(tiles, how)[0]) == -(-how[1] // how[2])}

    def backward(
        self,
        tiles: Tiles,
        dout: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        *,
        first: Collection[Side] = (),
    ) -> list[Launch]:
        """The launches: first for dq, which also prepares lse and delta for the others; then for dk and dv.

        In one pass: a short launch that prepares these, then one for all gradients.

        Args:
            first: sides whose gradients are written and not read, and may have the dtype of q; see `written`.
        """
        if dout.shape != (*self.q.shape[:3], self.v.size(3)):
            raise ValueError(f"dout {list(dout.shape)} does not fit q {list(self.q.shape)}, v {list(self.v.shape)}")
        rows = self.q.shape[:3]
        _check_sums({"lse": (lse, rows), "delta": (delta, rows)})
        _check_sums({"dq": (dq, self.q.shape)}, self.q.dtype if "q" in first else None)
        keys = {"dk": (dk, self.k.shape), "dv": (dv, self.v.shape)}
        _check_sums(keys, self.q.dtype if "k" in first else None)
        tensors = {"q": self.q, "k": self.k, "v": self.v, "dout": dout}
        s, b, h = rows
        ready = torch.empty(2, b, h, s, dtype=torch.float32, device=self.q.device)
        others = {**self._by_position(tiles), "ready_lse": ready[0], "ready_delta": ready[1]}
        whole, of_key = {"lse": lse, "delta": delta}, {"dk": dk, "dv": dv}
        if "backward" in self.passes():
            (of_keys,) = self._bits(tiles, ["k"])
            every = self._launch("backward", tiles, {**tensors, "dq": dq, **of_key}, of_keys, others, "k" in first)
            return [_ready(others, whole, self.scale), every]
        of_queries, of_keys = self._bits(tiles, ["q", "k"])
        queries = self._launch("queries", tiles, {**tensors, **whole, "dq": dq}, of_queries, others, "q" in first)
        keys = self._launch("keys", tiles, {**tensors, **of_key}, of_keys, others, "k" in first)
        if not keys.sizes.split:
            return [queries, keys]
        return [queries, *(replace(keys, arguments={**keys.arguments, other: False}) for other in ("DV", "DK"))]

    def passes(self) -> tuple[Pass, ...]:
        """The kernels of forward and backward pass."""
        if self.fixed:
            of_keys = ("backward",) if "backward" in self.fixed else ("queries", "keys")
            return (*(("plain",) if "plain" in self.fixed else ()), "forward", *of_keys)
        kind = self.q.element_size(), max(self.q.size(3), self.v.size(3)), self.measured
        return passes(*kind, deterministic=torch.are_deterministic_algorithms_enabled())

    def _bits(self, tiles: Tiles, sides: list[Side]) -> Sequence[Tensor | None]:
        if not tiles.masked:
            return [None] * len(sides)
        if self.mask is None:
            raise ValueError("masked tiles need a mask: give mask=")
        return pack(tiles, self.mask, self.q.device, sides)

    def _launch(
        self,
        which: Pass,
        tiles: Tiles,
        tensors: dict[str, Tensor],
        bits: Tensor | None,
        others: dict[str, Tensor | None],
        first: bool,
    ) -> Launch:
        (s, b, h, d), (t, _, hk, _) = self.q.shape, self.k.shape
        device, value, side = self.q.device, self.v.size(3), SIDES[which]
        capped, (sizes, how) = self.softcap is not None, self._chosen(which, tiles)
        walked = walk(tiles, how, device)
        drops = 0
        if self.dropout is not None:  # keys that share a hash; before Blackwell, forward needs fewer instructions for 2
            shared = LANES // 2 if which == "forward" and (self.capability or 0) < 100 else LANES
            drops = shared if in_groups(tiles, how) else 1
        shape = {"q_rows": s, "k_rows": t, "HEADS": h, "GROUP": h // hk, "HEAD": d, "VALUE": value}
        arguments = {
            **tensors,
            **_strides(tensors),
            **shape,
            "blocks": walked.blocks,
            "ranges": walked.ranges,
            "bits": bits,
            **others,
            "factor": self.scale * LOG2E * (2 / self.softcap if capped else 1),
            "cap": self.softcap * LOG2E if capped else 1.0,
            "threshold": self.dropout.threshold if self.dropout else 0,
            "kept_scale": self.dropout.scale if self.dropout else 1.0,
            "HEAD_BLOCK": _power(d),
            "VALUE_BLOCK": _power(value),
            "BLOCK": sizes.block,
            "STEP": sizes.step,
            "MASKED": bits is not None,
            "FIRST": first,
            "PLAIN": not sizes.one_loop,
            "ALIBI": self.slopes is not None,
            "CAPPED": capped,
            "DROPS": drops,
            "WIDE": _wide(max(sizes.block, sizes.step), *tensors.values()),
            "PRECISION": "interpreted" if self.capability is None else "ieee",  # of products of fp32
        }
        if which != "forward":
            arguments["scale"] = self.scale
        if which in DESCRIBED:
            arguments |= self._described(which, tensors, sizes)
        if which in ("keys", "backward"):
            arguments |= {"DQ": which == "backward", "DK": True, "DV": True}
        if which == "keys":
            arguments |= dict.fromkeys(("dq", "dq_ss", "dq_sb", "dq_sh", "dq_sd"))
        heads = h if side == "q" else hk
        return Launch(_functions()[which], (len(walked.blocks), b * heads), arguments, sizes)

    def _described(self, which: Pass, tensors: dict[str, Tensor], sizes: Blocks) -> dict[str, Any]:
        """Descriptors of the tensors whose rows a kernel reads step by step, if its sizes ask for them; else None."""
        read = {f"{name}_blocks": tensors[name] for name in DESCRIBED[which]}
        whole = all(x.size(3) == _power(x.size(3)) and _describable(x) for x in read.values())
        if not (sizes.described and whole):
            return dict.fromkeys(read)
        return {name: _descriptor(x, sizes.step) for name, x in read.items()}

    def _chosen(self, which: Pass, tiles: Tiles) -> tuple[Blocks, Sizes]:
        present = {"alibi": self.slopes, "softcap": self.softcap, "dropout": self.dropout}
        features = [name for name, value in present.items() if value is not None]
        kind = self.q.element_size(), max(self.q.size(3), self.v.size(3)), self.capability, features, self.measured
        sizes = (self.fixed or {}).get(which) or chosen(which, tiles, *kind)
        return sizes, walk_sizes(which, sizes, self.q.size(0), self.k.size(0))

    def _by_position(self, tiles: Tiles) -> dict[str, Tensor | None]:
        """The arguments for ALiBi and dropout: positions of rows, slopes, and the keys of dropout's hashes."""
        arguments = dict.fromkeys(("slopes", "q_places", "k_places", "row_keys", "column_keys"))
        device = self.q.device
        if self.slopes is not None or self.dropout is not None:
            arguments["q_places"] = places(tiles, "q", self.q.size(0), device)
            arguments["k_places"] = places(tiles, "k", self.k.size(0), device)
        if self.slopes is not None:
            arguments["slopes"] = to_device(self.slopes.to(torch.float32), device)
        if self.dropout is not None:
            arguments["row_keys"] = self.dropout.row_keys(arguments["q_places"].long(), self.q.size(2))
            arguments["column_keys"] = self.dropout.column_keys(arguments["k_places"].long() // LANES)
        return arguments


def _ready(ready: dict[str, Tensor | None], tensors: dict[str, Tensor], scale: float) -> Launch:
    """The launch that prepares lse and delta for a backward pass of one pass."""
    rows, b, h = tensors["lse"].shape
    outputs = {name: ready[name] for name in ("ready_lse", "ready_delta")}
    arguments = {**tensors, **outputs, **_strides(tensors), "q_rows": rows, "scale": scale}
    arguments |= {"HEADS": h, "BLOCK": 256}
    return Launch(_functions()["ready"], (-(-rows // 256), b * h), arguments, Blocks(256, 256, 4, 1))


def _check_sums(tensors: dict[str, tuple[Tensor, tuple[int, ...]]], also: torch.dtype | None = None) -> None:
    """``also``: a dtype that is allowed besides fp32."""
    for name, (x, shape) in tensors.items():
        if x.shape != shape or x.dtype not in (torch.float32, also):
            raise ValueError(f"{name} must be fp32 {list(shape)}, not {x.dtype} {list(x.shape)}")


def _strides(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The strides of tensors [s, b, h, d] by the kernels' names, for q: q_ss, q_sb, q_sh, q_sd."""
    return {f"{name}_s{at}": stride for name, x in tensors.items() for at, stride in zip("sbhd", x.stride())}


def _power(size: int) -> int:
    """The block size for a head: a power of two, and at least 16, the smallest size for tensor cores."""
    return max(16, 1 << (size - 1).bit_length())


def _describable(x: Tensor) -> bool:
    """Whether a descriptor can describe x: entries are adjacent, and addresses multiples of 16 bytes."""
    aligned = not any(n * x.element_size() % 16 for n in (*x.stride()[:3], x.storage_offset()))
    return x.stride(3) == 1 and x.stride(0) > 0 and aligned and _width(x) < 2**31


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _descriptor(x: Tensor, rows: int) -> Any:
    """What loads rows [rows, d] of x [s, b, h, d], seen as [s, all else]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, [x.size(0), _width(x)], [x.stride(0), 1], [rows, x.size(3)])


def _width(x: Tensor) -> int:
    """Elements from the first of a row of x [s, b, h, d] to its last."""
    return sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:])) + 1


def _wide(rows: int, *tensors: Tensor) -> bool:
    """Whether offsets within a block need more than 32 bits."""
    return any((rows * x.stride(0) + _power(x.size(-1)) * x.stride(-1)) >= 2**31 for x in tensors)


def interpreted() -> bool:
    """Whether Triton is in interpreter mode, for CPU tensors."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def _functions() -> dict[str, Any]:
    """The kernels. They are imported here because Triton takes a second to import and need not be installed."""
    from megatron.context_parallel.attention.kernels.triton_kernels import (
        triton_backward,
        triton_forward,
        triton_plain,
    )

    return {
        "plain": triton_plain.plain_kernel,
        "forward": triton_forward.forward_kernel,
        "merge": triton_forward.merge_kernel,
        "queries": triton_backward.query_kernel,
        "keys": triton_backward.key_kernel,
        "backward": triton_backward.key_kernel,
        "ready": triton_backward.ready_kernel,
        "delta": triton_backward.delta_kernel,
    }
