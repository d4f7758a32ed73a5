# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (RoPE): its frequencies, methods to extend the context, and the rotation.

Pair i of the d rotated entries of a head is rotated by ``position * base ** (-2i / d)``. To go beyond the length that a
model was trained on, frequencies are lowered: all by one factor (linear interpolation), or only the slow ones (Llama
3.1; YaRN, arXiv:2309.00071, which also scales the attention scores).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.context_parallel.layout.documents import restart
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span, positions
from megatron.context_parallel.layout.tree import Tree
from megatron.platform.autograd import once_differentiable
from megatron.platform.hooks import replaceable
from megatron.platform.streams import runs_triton, to_device

# Llama 3.1 lowers frequencies with less than one turn in the original length, keeps those with more than four turns,
# and interpolates in between.
LLAMA3_LENGTH, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
# Elements rotated at a time, which limits the fp32 memory: on a CPU they fit its caches, on a GPU they keep it busy.
PIECE = {"cpu": 2**18, "cuda": 2**24}


@dataclass(frozen=True)
class Yarn:
    """YaRN: pairs with many turns within the original length are unchanged, those with few turns are interpolated.

    Attributes:
        factor: how many times longer sequences become.
        original_length: sequence length of the original training.
        beta_fast, beta_slow: pairs with more than ``beta_fast`` turns in ``original_length`` keep their frequency; in
            those with fewer than ``beta_slow`` it is divided by ``factor``; in between it is interpolated.
        mscale, mscale_all_dim: parameters of :attr:`attention_factor`.
        whole_pairs: whether the two bounds are rounded outwards to whole pairs.
    """

    factor: float
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    whole_pairs: bool = True

    @property
    def attention_factor(self) -> float:
        """Factor on queries and keys, and so its square on scores. By default 0.1 ln(factor) + 1."""
        if self.factor <= 1:
            return 1.0
        grown = 0.1 * math.log(self.factor)
        return (grown * self.mscale + 1) / (grown * self.mscale_all_dim + 1)

    def apply(self, inv_freq: Tensor, base: float) -> Tensor:
        """The lowered frequencies, from fp64 [dim / 2] with base ``base``."""
        dim = 2 * inv_freq.numel()

        def pair(turns: float) -> float:
            """The (fractional) pair with this number of turns within the original length."""
            return dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.whole_pairs:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high > low else 0.001  # a step, as wide as in the published implementations
        lowered = ((torch.arange(dim // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
        return inv_freq * (1 - lowered) + inv_freq / self.factor * lowered


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one model.

    Attributes:
        dim: number of entries at the start of a head that are rotated; even.
        base: of the frequencies.
        interleaved: pairs are neighbouring entries; otherwise a pair is entry i of each half.
        interpolation: positions are divided by this (linear interpolation).
        llama3: factor of Llama 3.1's scaling; None for none.
        yarn: YaRN; None for none.
    """

    dim: int
    base: float = 10000.0
    interleaved: bool = False
    interpolation: float = 1.0
    llama3: float | None = None
    yarn: Yarn | None = None

    def inverse_frequencies(self) -> Tensor:
        """Radians per position of each pair, fp64 [dim / 2] on the CPU.

        In fp32 they would have a relative error of 3e-8, which is a tenth of a radian at position four million.
        """
        inv_freq = self.base ** -(torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        if self.llama3 is not None:
            inv_freq = _llama3(inv_freq, self.llama3)
        if self.yarn is not None:
            inv_freq = self.yarn.apply(inv_freq, self.base)
        return inv_freq / self.interpolation

    @property
    def attention_factor(self) -> float:
        """Factor on queries and keys."""
        return 1.0 if self.yarn is None else self.yarn.attention_factor

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """Rotate heads by their positions' angles, and multiply by the attention factor.

        Args:
            x: [s, b, heads, d]; entries after the first ``dim`` of a head are unchanged.
            angles: fp32 [s, 1 or b, 1, dim / 2].

        Returns:
            Like x. Sine, cosine and products are fp32 (fp64 for fp64) and rounded to the dtype of x once, at the end;
            megatron-core also rounds the sine, the cosine and each product. Only the angles are kept for backward. On a
            GPU this is one kernel (rope_kernel.py) if Triton is installed, as it is with PyTorch for CUDA.
        """
        return _Rotate.apply(x, angles, self)


def rotary_angles(positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Angles of RoPE at any positions.

    Args:
        positions: int64 [...].
        inv_freq: fp64 [dim / 2], of :meth:`Rope.inverse_frequencies`.

    Returns:
        fp32 [..., dim / 2]. The product is computed in fp64 and reduced to one turn before it is rounded. Angles are
        therefore as exact at position four million as at four; in fp32 the error would be a tenth of a radian.
    """
    return (positions[..., None] * inv_freq.to(positions.device) % (2 * torch.pi)).float()


def _llama3(inv_freq: Tensor, factor: float) -> Tensor:
    turns = LLAMA3_LENGTH * inv_freq / (2 * torch.pi)
    kept = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0, 1)
    return inv_freq * kept + inv_freq / factor * (1 - kept)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, rope: Rope) -> Tensor:
        ctx.save_for_backward(angles)
        ctx.rope = rope
        return rotated(x, angles, rope, 1)

    @staticmethod
    @once_differentiable("a rotation by positions")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (angles,) = ctx.saved_tensors
        return rotated(grad, angles, ctx.rope, -1), None, None


@replaceable
def rotated(x: Tensor, angles: Tensor, rope: Rope, sign: int) -> Tensor:
    """See :meth:`Rope.rotate`; ``sign`` -1 rotates back."""
    if runs_triton(x):
        from megatron.context_parallel.positions.rope_kernel import rotated

        return rotated(x, angles, rope.dim, rope.attention_factor, rope.interleaved, sign)
    out, wide = torch.empty_like(x), torch.promote_types(x.dtype, torch.float32)
    rows = max(PIECE.get(x.device.type, 2**24) // max(x[0].numel(), 1), 1)
    for part, target, angle in zip(x.split(rows), out.split(rows), angles.split(rows)):
        cos, sin = (turn.to(wide).mul_(rope.attention_factor) for turn in (angle.cos(), angle.sin()))
        first, second = (half.to(wide) for half in _pairs(part, rope))
        to_first, to_second = _pairs(target, rope)
        to_first.copy_((first * cos).addcmul_(second, sin, value=-sign))
        to_second.copy_((second * cos).addcmul_(first, sin, value=sign))
        target[..., rope.dim :] = part[..., rope.dim :]
    return out


def _pairs(x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Views of the two entries of every pair."""
    if rope.interleaved:
        pairs = x[..., : rope.dim].unflatten(-1, (-1, 2))
        return pairs[..., 0], pairs[..., 1]
    return x[..., : rope.dim // 2], x[..., rope.dim // 2 : rope.dim]


Ends = tuple[int, ...]
"""One past the last token of each document packed into a sequence."""


class LayoutRotaryEmbedding:
    """RoPE at the positions this rank holds. It replaces megatron-core's, inside the attention core.

    Core has a fixed zigzag order of positions, computes angles in fp32 and rotates in the dtype of the heads. In
    this class positions come from the layout.

    Args:
        rope: frequencies and pairs.
        layout: which positions this rank holds.
        device: of queries and keys.
        restarts: whether positions restart in each document.
    """

    def __init__(
        self, rope: Rope, layout: SequenceLayout, device: torch.device | str = "cpu", *, restarts: bool = False
    ) -> None:
        self.rope, self.layout, self.restarts = rope, layout, restarts
        self.inv_freq = rope.inverse_frequencies().to(device)
        self._known: tuple[tuple[Ends, ...], Tensor] | None = None

    def angles(self, documents: Sequence[Ends] = ()) -> Tensor:
        """Angles of this rank's tokens, fp32 [s_local, 1 or b, 1, dim / 2]; the last result is kept, for all layers.

        Args:
            documents: the ends of each sample's documents; empty if a sequence is one document.
        """
        varies = self._restart(documents) or self.layout.balance == "documents"
        key = tuple(documents) if varies else ()
        key = key[:1] if len(set(key)) == 1 else key
        if self._known is None or self._known[0] != key:
            self._known = key, self._angles(key)
        return self._known[1]

    def _angles(self, documents: tuple[Ends, ...]) -> Tensor:
        layout = self.layout.of_documents(documents[0]) if documents else self.layout
        at = to_device(layout.positions, self.inv_freq.device)[:, None]
        if self._restart(documents):
            at = torch.cat([restart(at, ends) for ends in documents], dim=1)
        return rotary_angles(at, self.inv_freq)[:, :, None]

    def of_spans(self, spans: tuple[Span, ...], document: Ends | None = None) -> Tensor:
        """Angles, fp32 [s, 1, 1, dim / 2], of any positions in a sequence."""
        at = positions(spans, self.inv_freq.device)
        if document is not None and self._restart([document]):
            at = restart(at, document)
        return rotary_angles(at, self.inv_freq)[:, None, None]

    def _restart(self, documents: Sequence[Ends]) -> bool:
        """Whether positions are those within documents; a tree has no others."""
        return any(self.restarts or isinstance(ends, Tree) for ends in documents)

    def rotate(self, query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [s, b, heads, d], rotated by ``angles``."""
        return self.rope.rotate(query, angles), self.rope.rotate(key, angles)
