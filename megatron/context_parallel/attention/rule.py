# SPDX-License-Identifier: Apache-2.0
"""What attention computes, and with which kernel, independent of which rank holds which tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels.base import Final, Kernel, Scores
from megatron.context_parallel.attention.kernels.sums import Accumulator, GradientSum, KeyGradients
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.masks import Causal, Mask, check_mask, has_tree, inside_tiles, tile_rows
from megatron.context_parallel.layout.tiles import Tiles
from megatron.context_parallel.positions.position_dropout import Dropout
from megatron.decisions.block_sizes import BlockTable
from megatron.decisions.key_exchange import KEY_EXCHANGES, PASSED_ON
from megatron.platform.autograd import autocast_inputs, without_autocast
from megatron.platform.streams import to_device


@dataclass(frozen=True)
class TileKernel:
    """A kernel and how it computes scores, for the heads and samples of some queries."""

    kernel: Kernel
    scores: Scores

    @without_autocast
    def attend(self, tiles: Tiles, q_SBHD: Tensor, k_SBHD: Tensor, v_SBHD: Tensor, result: Accumulator) -> None:
        """Merge the tiles between a query block and a key block into ``result``."""
        self.kernel.attend(tiles, q_SBHD, k_SBHD, v_SBHD, self.scores, result)

    @without_autocast
    def attend_grad(
        self, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor, final: Final, dq: GradientSum, dkv: KeyGradients
    ) -> None:
        """The backward pass of :meth:`attend`: adds the tiles' gradients to ``dq`` and ``dkv``."""
        self.kernel.attend_grad(tiles, q, k, v, self.scores, final, dq, dkv)

    @without_autocast
    def final(self, dout_SBHD: Tensor, out_SBHD: Tensor, lse_SBH: Tensor) -> Final:
        """The results of all tiles of these queries, for :meth:`attend_grad`."""
        return Final(dout_SBHD, out_SBHD, lse_SBH, self.kernel.delta(out_SBHD, dout_SBHD))


@dataclass(frozen=True)
class AttentionRule:
    """What attention computes, and how: its kernel, memory and messages. It does not depend on the layout.

    Attributes:
        mask: which keys a query attends to.
        kernel: ``auto``, ``flash_attn``, ``cudnn``, ``flash``, ``cpu``, ``triton`` or ``math``.
        scale: factor on q @ k^T; default ``d ** -0.5``.
        alibi_slopes: fp32 [heads], of the heads before the all-to-all: ``slope * |distance|`` is subtracted from each
            score (ALiBi, arXiv 2108.12409).
        mask_cpu_threshold: for longer sequences, masks that are evaluated for each pair (``MaskFunction``) are made in
            host memory, in blocks of rows (DeepSpeed4Science, figure 4).
        dropout: of the attention weights, by position, for the heads before the all-to-all. None or a probability of 0:
            no dropout.
        gather_keys: the same as ``exchange="all_gather"``.
        exchange: how keys travel on the ring, by the table of decisions/key_exchange.py.
        softcap: a score s becomes ``softcap * tanh(s / softcap)``, before ALiBi (Gemma 2, arXiv 2408.00118); None: no
            cap.
        sinks: fp32 [heads], of the heads before the all-to-all: one additional score in each softmax of a head, for a
            key that every query sees and whose value is 0 (StreamingLLM, arXiv 2309.17453; learned as in gpt-oss). A
            rank's gradient contains only its own queries and heads; as for any weight that is replicated over the
            context-parallel group, the sum over the group is the complete gradient.
        up: [heads, N + V, C], of the heads before the all-to-all: keys and values are sent as latents, and each rank
            makes those of its heads (latent_blocks.py); not supported in chunks. ``v`` is then the latent of each token
            [s, b, 1, C], and ``k`` the rotated part of its key [s, b, 1, d - N]. Its gradient is like that of sinks.
            A head's key has size d, of which N are made from the latent of size C; its value has size V.
        measured: block sizes of Triton's kernels that were measured on this machine; None: those of decisions/.
    """

    mask: Mask = Causal()
    kernel: str = "auto"
    scale: float | None = None
    alibi_slopes: Tensor | None = None
    mask_cpu_threshold: int = 16384
    dropout: Dropout | None = None
    gather_keys: bool = False
    exchange: str = PASSED_ON
    softcap: float | None = None
    sinks: Tensor | None = None
    up: Tensor | None = None
    measured: BlockTable | None = None

    def __post_init__(self) -> None:
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap} must be above 0; use None for no cap")
        if self.gather_keys:
            object.__setattr__(self, "exchange", "all_gather")
        if self.exchange not in KEY_EXCHANGES:
            raise ValueError(f"exchange={self.exchange!r} is unknown: use one of {', '.join(KEY_EXCHANGES)}")

    def tile_kernel(self, q_SBHD: Tensor, ulysses: Axis, seq_length: int, value_dim: int | None = None) -> TileKernel:
        """The kernel and its options for queries [s, b, heads of this rank, d], after the all-to-all.

        Args:
            value_dim: size of the value heads; default d.

        Raises:
            KernelUnavailable: the kernel cannot run on this machine, or does not support this rule.
            ValueError: slopes or dropout are for another number of heads or samples, slopes for a tree, or documents
                for another length. TypeError: the mask is none.
        """
        check_mask(self.mask, seq_length)
        batch, heads, size = q_SBHD.shape[1:]
        dropout = self.dropout if self.dropout is not None and self.dropout.threshold else None
        if dropout is not None:
            if len(dropout.samples) != batch:
                raise ValueError(
                    f"dropout.samples has {len(dropout.samples)} numbers, not {batch}: give one for each sample"
                )
            dropout = dropout.of_heads(ulysses.rank * heads)
        slopes = _of_rank(self.alibi_slopes, "alibi_slopes", heads, ulysses)
        if slopes is not None and has_tree(self.mask):
            raise ValueError("ALiBi's distances do not follow the paths of a tree: use RoPE, or separate rows")
        slopes = None if slopes is None else to_device(slopes, q_SBHD.device)
        kernel = kernels.select(
            self.kernel,
            device=q_SBHD.device,
            dtype=q_SBHD.dtype,
            head_dim=max(size, value_dim or size),
            tile_rows=tile_rows(self.mask),
            needs_mask=self.mask.fine,
            needs_bias=slopes is not None,
            needs_dropout=dropout is not None,
            needs_softcap=self.softcap is not None,
            needs_value_dim=value_dim not in (None, size),
        )
        scale = size**-0.5 if self.scale is None else self.scale
        in_host = seq_length > self.mask_cpu_threshold
        mask = inside_tiles(self.mask)
        return TileKernel(kernel, Scores(scale, mask, slopes, in_host, dropout, self.softcap, self.measured))

    def local_sinks(self, q_SBHD: Tensor, ulysses: Axis) -> Tensor | None:
        """The sinks of the heads in queries [s, b, heads of this rank, d], after the all-to-all. Differentiable."""
        return _of_rank(self.sinks, "sinks", q_SBHD.size(2), ulysses)

    def local_up(self, q_SBHD: Tensor, ulysses: Axis) -> Tensor | None:
        """The up-projection of those heads, in the dtype of the queries. Differentiable."""
        return None if self.up is None else _of_rank(self.up, "up", q_SBHD.size(2), ulysses, 3).to(q_SBHD.dtype)


def one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the dtype of the computation: cast if autocast is on.

    Raises:
        ValueError: q, k and v have different dtypes; ranks would exchange messages of the wrong size.
    """
    q, k, v = autocast_inputs(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}: cast them to one dtype")
    return q, k, v


def _of_rank(x: Tensor | None, name: str, heads: int, ulysses: Axis, dims: int = 1) -> Tensor | None:
    """The part of a tensor [all heads, ...] for this Ulysses rank, which has ``heads`` heads."""
    if x is None:
        return None
    if x.dim() != dims or x.size(0) != heads * ulysses.size:
        one = "number" if dims == 1 else "matrix"
        raise ValueError(f"{name} has shape {list(x.shape)}: give one {one} for each of {heads * ulysses.size} heads")
    return x[ulysses.rank * heads : (ulysses.rank + 1) * heads]
