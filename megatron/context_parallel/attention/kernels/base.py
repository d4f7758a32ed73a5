# SPDX-License-Identifier: Apache-2.0
"""What a local attention kernel is, and the checks and tensor chores that all of them share.

Shapes: q, dq ``[b, h, sq, d]``; k, dk ``[b, hk, sk, d]`` with hk dividing h; v, dv ``[b, hk, sk, dv]``; out, dout
``[b, h, sq, dv]``, where dv is d for kernels without ``supports_value_dim``; lse ``[b, h, sq]``. Query head i reads key
head ``i // (h // hk)``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.attention.kernels.row_mask import AnyMask, RowMask
from megatron.context_parallel.layout.masks import Mask
from megatron.context_parallel.layout.tiles import Tile
from megatron.context_parallel.positions.dropout import Dropout

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
