# SPDX-License-Identifier: Apache-2.0
"""USP: Ulysses around Ring (USP paper, algorithm 1). Pure Ulysses, pure Ring and one process are its grid shapes."""

from __future__ import annotations

from torch import Tensor

from megatron.context_parallel import kernels
from megatron.context_parallel.layout import SequenceLayout
from megatron.context_parallel.masks import Causal, Mask
from megatron.context_parallel.ring import RingSource, ring_plan
from megatron.context_parallel.tiled import tiled_attention
from megatron.context_parallel.ulysses import ulysses_attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: SequenceLayout,
    mask: Mask = Causal(),
    kernel: str = "auto",
    scale: float | None = None,
) -> Tensor:
    """Exact attention over the whole sequence, each rank with its own tokens.

    Args:
        q: [s_local, b, heads, d]; k, v: [s_local, b, kv_heads, d]; kv_heads divides heads (GQA, MQA).
            Tokens are those of ``layout.positions``.
        layout: who holds which tokens.
        mask: which keys a query attends to.
        kernel: ``auto``, ``flash_attn``, ``cudnn``, ``flash``, ``cpu`` or ``math``.
        scale: factor on q @ k^T; default ``d ** -0.5``.

    Returns:
        [s_local, b, heads, d].

    Raises:
        ValueError: the Ulysses degree does not divide the heads, or the tokens are not the layout's.
        KernelUnavailable: the kernel cannot run here.
    """
    if layout.chunks > 1:
        raise ValueError(f"the layout has {layout.chunks} chunks, which only ChunkedLayer reads: make it with chunks=1")
    if q.size(0) != layout.local_length or k.size(0) != layout.local_length:
        raise ValueError(
            f"q and k have {q.size(0)} and {k.size(0)} tokens, the layout gives a rank {layout.local_length}"
        )
    tile_kernel = kernels.select(kernel, device=q.device, dtype=q.dtype, head_dim=q.size(3))
    plan = ring_plan(layout, mask)
    factor = q.size(3) ** -0.5 if scale is None else scale

    def local(q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor) -> Tensor:
        source = RingSource(plan, layout.grid.ring)
        return tiled_attention(q_SBHD, k_SBHD, v_SBHD, source=source, kernel=tile_kernel, scale=factor)

    return ulysses_attention(q, k, v, axis=layout.grid.ulysses, attention=local)
