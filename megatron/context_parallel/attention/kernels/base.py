# SPDX-License-Identifier: Apache-2.0
"""The interface of a local attention kernel, and checks and helpers that all kernels share.

Shapes: q, dq ``[b, h, sq, d]``; k, dk ``[b, hk, sk, d]`` with hk dividing h; v, dv ``[b, hk, sk, dv]``; out, dout
``[b, h, sq, dv]``, where dv is d for kernels without ``supports_value_dim``; lse ``[b, h, sq]``. Query head i reads key
head ``i // (h // hk)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.tiles import Tiles
from megatron.context_parallel.positions.position_dropout import Dropout, TileDropout
from megatron.platform.streams import to_device

ROW_MASK_BYTES = 32 * 2**20  # memory limit for computing one block of rows of a RowMask
PAIR_BYTES = 24  # for each pair while its mask is computed: two int64 for positions, and booleans


@dataclass(frozen=True)
class RowMask:
    """Mask, bias, dropout and soft-cap of a tile's pairs, computed for a block of rows at a time.

    Attributes:
        allowed: (first row, end row, number of keys) -> boolean [rows, keys], on any device; None allows all pairs.
        bias: same arguments -> [heads, rows, keys], in the dtype of lse, on the tile's device; None: no bias.
        heads: number of heads of ``bias``.
        dropout: which weights, of the softmax over *all* keys, become 0; None: no dropout. It does not change lse, so
            that tiles are merged as without dropout.
        softcap: a score s becomes ``softcap * tanh(s / softcap)`` before ``bias`` is added; None: no cap.
    """

    allowed: Callable[[int, int, int], Tensor] | None = None
    bias: Callable[[int, int, int], Tensor] | None = None
    heads: int = 1
    dropout: TileDropout | None = None
    softcap: float | None = None

    def bytes_per_row(self, keys: int, itemsize: int) -> int:
        """Bytes needed to compute one row."""
        made = PAIR_BYTES if self.allowed else itemsize  # of the mask, or of the distances for the bias
        return keys * (made + (self.heads if self.bias else 1) * itemsize)


AnyMask = Tensor | RowMask | None


def dropout_of(mask: AnyMask) -> TileDropout | None:
    """The dropout of a tile's weights."""
    return mask.dropout if isinstance(mask, RowMask) else None


def softcap_of(mask: AnyMask) -> float | None:
    """The soft-cap of a tile's scores."""
    return mask.softcap if isinstance(mask, RowMask) else None


def mask_rows(mask: AnyMask, causal: bool, start: int, end: int, keys: int, device: torch.device) -> Tensor | None:
    """Which of a tile's first ``keys`` keys the query rows start..end may attend to; None: all.

    A tensor is four-dimensional and may be on another device, for example in host memory; only these rows are copied.
    Returns a boolean tensor that broadcasts to ``[b, h, end - start, keys]``.
    """
    allowed = None
    if isinstance(mask, RowMask):
        if mask.allowed is not None:
            allowed = to_device(mask.allowed(start, end, keys), device)[None, None]
    elif mask is not None:
        allowed = mask if mask.shape[2] == 1 else mask[:, :, start:end]
        allowed = to_device(allowed if mask.shape[3] == 1 else allowed[..., :keys], device)
    if causal:
        diagonal = torch.ones(end - start, keys, dtype=torch.bool, device=device).tril(start)
        allowed = diagonal.view(1, 1, end - start, keys) if allowed is None else allowed & diagonal
    return allowed


def bias_rows(mask: AnyMask, start: int, end: int, keys: int) -> Tensor | None:
    """The bias of the scores of query rows start..end and the first ``keys`` keys: [1, h, rows, keys] or None."""
    if not isinstance(mask, RowMask) or mask.bias is None:
        return None
    return mask.bias(start, end, keys)[None]


def row_blocks(rows: int, bytes_per_row: int, limit: int) -> Iterator[tuple[int, int]]:
    """Blocks (start, end) of ``rows`` with at most ``limit`` bytes each, but at least one row."""
    step = max(1, limit // bytes_per_row)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


Capability = tuple[int, int]


class KernelUnavailable(ValueError):
    """The requested kernel cannot run. ``reason`` is one line with the alternatives."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f'kernel="{name}": {reason}')
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple:  # for pickle
        return type(self), (self.name, self.reason)


class Kernel(Protocol):
    """One attention tile, forward and backward.

    A tile is a block of queries against a block of keys. Forward returns the output of the softmax over the *tile's*
    keys and its log-sum-exp, by which tiles are merged. Backward takes the *final*, merged ``out`` and ``lse``. With
    ``p = exp(scale * q k^T - lse)`` and ``delta = rowsum(dout * out)`` from these, the sum of the tiles' gradients is
    the gradient of the complete attention. Under dropout the weights that multiply v are p of the kept pairs divided by
    the probability of keeping; the rest is unchanged.

    A row that ``mask`` leaves without any key has out 0 and lse -inf. A row whose final lse is -inf has gradient 0.

    Both methods are plain functions of tensors, to be called from a ``torch.autograd.Function``. They accept strided
    views, usually of ``[s, b, h, d]`` memory, and may return any strides.
    """

    name: str
    supports_mask: bool
    supports_dropout: bool
    supports_softcap: bool
    supports_value_dim: bool

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None if the kernel can run on these tensors, else a short reason, for example "needs a GPU"."""
        ...

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        """The same for a GPU of this capability on another machine, with the newest versions of all packages."""
        ...

    def forward(
        self, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, mask: AnyMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns out_BHSD in the dtype of q and lse_BHS, natural logarithm, in fp32 (fp64 for fp64 inputs).

        ``causal``: query i sees keys 0..i; the tile must be square. ``mask``: boolean, True = attend, broadcastable to
        ``[b, h, sq, sk]``, or a `RowMask`; with ``causal`` both must allow a pair. Raises ValueError if the tensors do
        not fit, or if the kernel does not support masks.
        """
        ...

    def backward(
        self,
        dout_BHSD: Tensor,
        q_BHSD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        out_BHSD: Tensor,
        lse_BHS: Tensor,
        *,
        causal: bool,
        mask: AnyMask,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns dq, dk, dv of this tile, in the dtypes of q, k, v. ``out_BHSD`` and ``lse_BHS`` are the final ones.

        ``dout_BHSD`` may have any strides.
        """
        ...


class TilesKernel(Kernel, Protocol):
    """A kernel that also computes all tiles between a query block and a key block in one launch.

    It adds to running sums in place and supports masks, ALiBi and dropout by position. Tensors are ``[s, b, heads, d]``
    with any strides, sums are fp32.
    """

    def attend(
        self,
        tiles: Tiles,
        q_SBHD: Tensor,
        k_SBHD: Tensor,
        v_SBHD: Tensor,
        *,
        out_SBHD: Tensor,
        lse_SBH: Tensor,
        scale: float,
        mask: Mask,
        slopes: Tensor | None,
        softcap: float | None,
        dropout: Dropout | None,
    ) -> None:
        """Merge tiles into ``out`` and ``lse``, the results for all keys so far; at first 0 and -inf."""
        ...

    def attend_grad(
        self,
        tiles: Tiles,
        q_SBHD: Tensor,
        k_SBHD: Tensor,
        v_SBHD: Tensor,
        *,
        dout: Tensor,
        lse: Tensor,
        delta_SBH: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        scale: float,
        mask: Mask,
        slopes: Tensor | None,
        softcap: float | None,
        dropout: Dropout | None,
    ) -> None:
        """Add the gradients of tiles to ``dq``, ``dk``, ``dv``; ``lse`` and ``delta`` are those of the final output."""
        ...

    def delta(self, out_SBHD: Tensor, dout_SBHD: Tensor) -> Tensor:
        """Row sums of ``dout * out``, fp32 [s, b, heads]."""
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of sums: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tile(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: AnyMask) -> AnyMask:
    """Check the arguments of a kernel. Returns the mask, as a tensor with four dimensions or a `RowMask`.

    Raises:
        ValueError: they do not fit, or the kernel does not support them.
    """
    b, h, sq, d = q.shape
    hk, sk = k.shape[1:3]
    if k.shape != (b, hk, sk, d) or v.shape[:3] != k.shape[:3] or h % hk != 0:
        raise ValueError(f"q {list(q.shape)} does not fit k {list(k.shape)}, v {list(v.shape)} as [b, heads, s, d]")
    if v.shape[3] != d and not kernel.supports_value_dim:
        raise ValueError(f"the attention kernel {kernel.name} needs value heads of the key heads' size, {d}")
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError(f"empty attention tile: q {list(q.shape)}, k {list(k.shape)}")
    if causal and sq != sk:
        raise ValueError(f"a causal tile must be square, this one has {sq} queries and {sk} keys")
    if mask is None:
        return None
    if not kernel.supports_mask:
        raise ValueError(f"the attention kernel {kernel.name} does not support masks")
    if isinstance(mask, RowMask):
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"an attention mask must be boolean (True = attend), not {mask.dtype}")
    full = [1] * (4 - mask.dim()) + list(mask.shape)
    if len(full) != 4 or any(have not in (1, want) for have, want in zip(full, (b, h, sq, sk), strict=True)):
        raise ValueError(f"the mask {list(mask.shape)} does not broadcast to {[b, h, sq, sk]}")
    return mask.view(full)


def empty_out(q_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
    """Memory for the output, [b, h, sq, dv], in the memory order of q."""
    if v_BHSD.shape[3] == q_BHSD.shape[3]:
        return torch.empty_like(q_BHSD)
    b, h, sq, _ = q_BHSD.shape
    return q_BHSD.new_empty((sq, b, h, v_BHSD.shape[3])).permute(1, 2, 0, 3)


def lse_for_backward(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The final lse in ``dtype``, with +inf for -inf, so that ``exp(score - lse)`` is 0 and not NaN without keys."""
    lse = lse.to(dtype)
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def gpu_reason(device: torch.device) -> str | None:
    """Why GPU kernels cannot run on a device, or None."""
    return "needs a GPU" if device.type != "cuda" or not torch.cuda.is_available() else None


def is_half(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is bf16 or fp16, which fused kernels support."""
    return dtype in (torch.bfloat16, torch.float16)


INT32_ELEMENTS = 2**31  # some GPU kernels index with int32: tensors of one call must have fewer elements


def compact(x: Tensor, limit: int = INT32_ELEMENTS) -> Tensor:
    """``x`` itself if a fused kernel can read it in place, else a contiguous copy.

    It can if the last dimension is contiguous, none is expanded, and all elements are within ``limit`` of the first.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if x.stride(-1) != 1 or expanded or span > limit else x


def pieces(q: Tensor, k: Tensor, limit: int = INT32_ELEMENTS) -> list[tuple[slice, slice, slice]]:
    """Slices (batch, query heads, key heads) of pieces whose tensors have fewer than ``limit`` elements.

    Keys and values are counted with the number of query heads, since kernels expand their gradients. A piece has at
    least one head, even if that head exceeds ``limit``. Nearly always one piece is enough.
    """
    b, h, sq, d = q.shape
    hk, sk = k.shape[1:3]
    group, per_call = h // hk, max(1, (limit - 1) // (max(sq, sk) * d))  # per_call: query heads in one call
    if per_call >= h:
        step = per_call // h
        return [(slice(i, min(i + step, b)), slice(0, h), slice(0, hk)) for i in range(0, b, step)]
    cuts: list[tuple[slice, slice]] = []
    if per_call >= group:
        step = per_call // group
        for i in range(0, hk, step):
            end = min(i + step, hk)
            cuts.append((slice(i * group, end * group), slice(i, end)))
    else:
        for i in range(hk):
            for j in range(i * group, (i + 1) * group, per_call):
                cuts.append((slice(j, min(j + per_call, (i + 1) * group)), slice(i, i + 1)))
    return [(slice(i, i + 1), heads, key_heads) for i in range(b) for heads, key_heads in cuts]


def forward_in_pieces(
    call: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limit: int = INT32_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """``out, lse = call(q, k, v)``, in as many calls as ``limit`` requires, on tensors that the kernel can read."""
    cuts = pieces(q, k, limit)
    if len(cuts) == 1:
        return call(compact(q, limit), compact(k, limit), compact(v, limit))
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=accumulation_dtype(q.dtype), device=q.device)
    for batch, heads, key_heads in cuts:
        q_part, k_part, v_part = q[batch, heads], k[batch, key_heads], v[batch, key_heads]
        out[batch, heads], lse[batch, heads] = call(*(compact(x, limit) for x in (q_part, k_part, v_part)))
    return out, lse


def backward_in_pieces(
    call: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    limit: int = INT32_ELEMENTS,
) -> tuple[Tensor, Tensor, Tensor]:
    """``dq, dk, dv = call(dout, q, k, v, out, lse)``, in pieces; ``call`` gets lse contiguous and without -inf."""
    dout, out, lse = dout.to(q.dtype), out.to(q.dtype), lse_for_backward(lse, accumulation_dtype(q.dtype))
    cuts = pieces(q, k, limit)
    if len(cuts) == 1:
        return call(*(compact(x, limit) for x in (dout, q, k, v, out)), lse.contiguous())
    dq = torch.empty_like(q)
    # In fp32, because several pieces are summed in one key head if its query heads are in different pieces.
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for batch, heads, key_heads in cuts:
        rows, columns = (batch, heads), (batch, key_heads)
        parts = (compact(x, limit) for x in (dout[rows], q[rows], k[columns], v[columns], out[rows]))
        dq[rows], dk_part, dv_part = call(*parts, lse[rows].contiguous())
        dk[columns] += dk_part
        dv[columns] += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)
