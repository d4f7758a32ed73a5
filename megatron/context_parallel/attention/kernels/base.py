# SPDX-License-Identifier: Apache-2.0
"""What a local attention kernel is, and the checks and tensor chores that all of them share.

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
from megatron.context_parallel.layout.tiles import Tile
from megatron.context_parallel.positions.position_dropout import Dropout, TileDropout
from megatron.platform.streams import to_device

# The mask of a tile, whole or made for a block of its rows at a time.


ROW_MASK_BYTES = 32 * 2**20  # what the making of one block of a RowMask's rows may take
PAIR_BYTES = 24  # of one pair while its mask is made: two int64 of arithmetic on positions, and the booleans


@dataclass(frozen=True)
class RowMask:
    """What a tile does with each of its pairs, made for a block of rows at a time.

    Attributes:
        allowed: (first row, end row, number of keys) -> boolean [rows, keys], on any device; None allows all.
        bias: the same arguments -> [heads, rows, keys], in the dtype of lse, on the tile's device; None adds nothing.
        heads: that ``bias`` is for.
        dropout: which weights, of the softmax over *all* keys, become 0; None keeps all. A kernel's lse is that
            softmax's: dropout does not change it, and tiles merge as without.
        softcap: a score s becomes ``softcap * tanh(s / softcap)`` before ``bias`` is added; None leaves it.
    """

    allowed: Callable[[int, int, int], Tensor] | None = None
    bias: Callable[[int, int, int], Tensor] | None = None
    heads: int = 1
    dropout: TileDropout | None = None
    softcap: float | None = None

    def bytes_per_row(self, keys: int, itemsize: int) -> int:
        """Bytes that one row takes while it is made."""
        made = PAIR_BYTES if self.allowed else itemsize  # besides: distances
        return keys * (made + (self.heads if self.bias else 1) * itemsize)


AnyMask = Tensor | RowMask | None


def dropout_of(mask: AnyMask) -> TileDropout | None:
    """What is dropped of a tile's weights."""
    return mask.dropout if isinstance(mask, RowMask) else None


def softcap_of(mask: AnyMask) -> float | None:
    """What the scores of a tile are capped at."""
    return mask.softcap if isinstance(mask, RowMask) else None


def mask_rows(mask: AnyMask, causal: bool, start: int, end: int, keys: int, device: torch.device) -> Tensor | None:
    """The pairs that query rows start..end of a tile may attend to, among its first ``keys`` keys; None for all.

    A tensor is four-dimensional and may live elsewhere, in host memory say: only these rows move. Returns a boolean
    tensor that broadcasts to ``[b, h, end - start, keys]``.
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
    """What is added to the scores of query rows start..end and the first ``keys`` keys: [1, h, rows, keys] or None."""
    if not isinstance(mask, RowMask) or mask.bias is None:
        return None
    return mask.bias(start, end, keys)[None]


def row_blocks(rows: int, bytes_per_row: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cuts ``rows`` into (start, end) so that a block holds at most ``limit`` bytes, but always one row."""
    step = max(1, limit // bytes_per_row)
    return ((start, min(start + step, rows)) for start in range(0, rows, step))


Capability = tuple[int, int]


class KernelUnavailable(ValueError):
    """The kernel that was asked for cannot run here. ``reason`` is one line and names the way out."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f'kernel="{name}": {reason}')
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple:  # pickled from process to process
        return type(self), (self.name, self.reason)


class Kernel(Protocol):
    """One attention tile, forward and backward.

    A tile is a block of queries against a block of keys. Its forward returns the softmax over *its* keys and their
    log-sum-exp; tiles merge by lse. Its backward takes the *final*, merged ``out`` and ``lse``: with
    ``p = exp(scale * q k^T - lse)`` and ``delta = rowsum(dout * out)`` from those, the gradients of the tiles sum up to
    the gradient of the whole. Under dropout ``p`` of the weights that multiply v is what was kept of it, divided by the
    probability to be kept, and the rest of this holds as it stands.

    A row without any key, by ``mask``, has out 0 and lse -inf; a row whose final lse is -inf has and gives no gradient.

    Both methods are plain functions of tensors, to be called from within a ``torch.autograd.Function``. They take
    strided views, usually of ``[s, b, h, d]`` memory, and return whatever strides suit the backend.
    """

    name: str
    supports_mask: bool
    supports_dropout: bool
    supports_softcap: bool
    supports_value_dim: bool

    def why_not(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """None where the kernel can run such tensors, else one short reason, for example "needs a GPU"."""
        ...

    def why_not_on(self, capability: Capability, dtype: torch.dtype, head_dim: int) -> str | None:
        """The same of a GPU that may be elsewhere, which has the newest of all that the kernel needs."""
        ...

    def forward(
        self, q_BHSD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, *, causal: bool, mask: AnyMask, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Returns out_BHSD in the dtype of q and lse_BHS, natural logarithm, in fp32 (fp64 for fp64 inputs).

        ``causal``: query i sees keys 0..i; the tile must be square. ``mask``: boolean, True = attend, broadcastable to
        ``[b, h, sq, sk]``, or a `RowMask`; with ``causal`` both must allow a pair. Raises ValueError on a tile that
        is not what it says, and on a mask where the kernel takes none.
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

    It adds to running sums in place and knows masks, ALiBi and dropout by position. Tensors are ``[s, b, heads, d]`` of
    any strides, sums fp32.
    """

    def attend(
        self,
        tiles: tuple[Tile, ...],
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
        """Merges tiles into what ``out`` and ``lse`` hold of all keys so far; at first 0 and -inf."""
        ...

    def attend_grad(
        self,
        tiles: tuple[Tile, ...],
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
        """Adds the gradients of tiles to ``dq``, ``dk``, ``dv``; ``lse`` and ``delta`` are of the final output."""
        ...

    def delta(self, out_SBHD: Tensor, dout_SBHD: Tensor) -> Tensor:
        """Row sums of ``dout * out``, fp32 [s, b, heads]."""
        ...


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse, and of the arithmetic behind it: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tile(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: AnyMask) -> AnyMask:
    """Raises ValueError where a tile breaks the contract; returns the mask, a tensor with four dimensions."""
    b, h, sq, d = q.shape
    hk, sk = k.shape[1:3]
    if k.shape != (b, hk, sk, d) or v.shape[:3] != k.shape[:3] or h % hk != 0:
        raise ValueError(f"q {list(q.shape)} does not fit k {list(k.shape)}, v {list(v.shape)} as [b, heads, s, d]")
    if v.shape[3] != d and not kernel.supports_value_dim:
        raise ValueError(f"the attention kernel {kernel.name} takes value heads of the key heads' size, {d}, alone")
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError(f"empty attention tile: q {list(q.shape)}, k {list(k.shape)}")
    if causal and sq != sk:
        raise ValueError(f"a causal tile is square, this one has {sq} queries and {sk} keys")
    if mask is None:
        return None
    if not kernel.supports_mask:
        raise ValueError(f"the attention kernel {kernel.name} takes no mask")
    if isinstance(mask, RowMask):
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"an attention mask is boolean, True = attend; got {mask.dtype}")
    full = [1] * (4 - mask.dim()) + list(mask.shape)
    if len(full) != 4 or any(have not in (1, want) for have, want in zip(full, (b, h, sq, sk), strict=True)):
        raise ValueError(f"the mask {list(mask.shape)} does not broadcast to {[b, h, sq, sk]}")
    return mask.view(full)


def empty_out(q_BHSD: Tensor, v_BHSD: Tensor) -> Tensor:
    """Memory for the output, [b, h, sq, dv], in the order of q's."""
    if v_BHSD.shape[3] == q_BHSD.shape[3]:
        return torch.empty_like(q_BHSD)
    b, h, sq, _ = q_BHSD.shape
    return q_BHSD.new_empty((sq, b, h, v_BHSD.shape[3])).permute(1, 2, 0, 3)


def lse_for_backward(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The final lse in ``dtype``, +inf for -inf: a row without keys then has ``exp(score - lse)`` 0 and not NaN."""
    lse = lse.to(dtype)
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def gpu_reason(device: torch.device) -> str | None:
    """Why no GPU kernel can run on a device, or None."""
    return "needs a GPU" if device.type != "cuda" or not torch.cuda.is_available() else None


def is_half(dtype: torch.dtype) -> bool:
    """Whether fused kernels take such tensors."""
    return dtype in (torch.bfloat16, torch.float16)


# A tile in as many calls as a fused kernel needs that counts elements in int32, and memory that it can read.


INT32_ELEMENTS = 2**31  # some GPU kernels index with int32: no tensor of one call reaches this many elements


def compact(x: Tensor, limit: int = INT32_ELEMENTS) -> Tensor:
    """``x`` itself where a fused kernel can read it in place, else a contiguous copy.

    In place means: last dimension contiguous, no expanded dimension, all elements within ``limit`` of the first.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    expanded = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if x.stride(-1) != 1 or expanded or span > limit else x


def pieces(q: Tensor, k: Tensor, limit: int = INT32_ELEMENTS) -> list[tuple[slice, slice, slice]]:
    """Cuts (batch, query heads, key heads) so that no tensor of a piece reaches ``limit`` elements, if a head allows.

    Counts keys and values at the number of query heads, since kernels expand their gradients. A single head is never
    cut. Nearly always returns one piece.
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
    """``out, lse = call(q, k, v)``, in as many calls as ``limit`` asks for, on tensors the kernel can read."""
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
    """``dq, dk, dv = call(dout, q, k, v, out, lse)``, in pieces; lse arrives contiguous, without -inf."""
    dout, out, lse = dout.to(q.dtype), out.to(q.dtype), lse_for_backward(lse, accumulation_dtype(q.dtype))
    cuts = pieces(q, k, limit)
    if len(cuts) == 1:
        return call(*(compact(x, limit) for x in (dout, q, k, v, out)), lse.contiguous())
    dq = torch.empty_like(q)
    # In fp32: several pieces add up in one key head where its query heads had to be cut.
    dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (k, v))
    for batch, heads, key_heads in cuts:
        rows, columns = (batch, heads), (batch, key_heads)
        parts = (compact(x, limit) for x in (dout[rows], q[rows], k[columns], v[columns], out[rows]))
        dq[rows], dk_part, dv_part = call(*parts, lse[rows].contiguous())
        dk[columns] += dk_part
        dv[columns] += dv_part
    return dq, dk.to(k.dtype), dv.to(v.dtype)
