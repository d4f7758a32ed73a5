# SPDX-License-Identifier: Apache-2.0
"""Dropout by position: which elements are dropped depends on their positions, not on the rank that computes them.

A counter-based generator (Salmon et al., SC 2011): the bits of an element are a hash of the seed, the dropout layer,
the sample, the head and the element's global positions. There is no state: a backward pass and a recomputed forward
pass draw the same numbers again, and nothing depends on the grid, on chunks or on the order of the work.

Row and column each have a 64-bit key, by SplitMix64 (Steele et al., OOPSLA 2014). The combined keys of a pair are
hashed again and give four elements 15 bits each. An element is dropped if its bits are below a threshold. Probabilities
are therefore multiples of 1/32768, and kept elements are divided by the rounded probability of keeping them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Spans, positions, whole_numbers
from megatron.platform.autograd import once_differentiable
from megatron.platform.streams import to_device

LEVELS = 2**15  # probabilities are multiples of 1 / LEVELS
LANES = 4  # consecutive elements of a row that share one hash
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
FIRST_SIGNED, SECOND_SIGNED, GOLDEN_SIGNED = (x - 2**64 for x in (FIRST, SECOND, GOLDEN))


@dataclass(frozen=True)
class Dropout:
    """One dropout of a model, for the samples of a batch.

    Attributes:
        probability: of dropping an element, at least 0 and below 1; rounded to a multiple of 1/32768.
        seed: of the run.
        stream: which dropout of the model; each stream draws different numbers.
        samples: the number of each sample of the batch among all samples of the run.
        head: the first head's number among all heads of the layer.
    """

    probability: float
    seed: int
    stream: int = 0
    samples: tuple[int, ...] = (0,)
    head: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", whole_numbers(self.samples, "the samples of a dropout"))
        if not (isfinite(self.probability) and 0 <= self.probability < 1):
            raise ValueError(f"a dropout probability must be at least 0 and below 1, not {self.probability}")

    @cached_property
    def threshold(self) -> int:
        """An element is dropped if its bits (0 to 32767) are below this."""
        return min(round(self.probability * LEVELS), LEVELS - 1)

    @property
    def scale(self) -> float:
        """Factor on kept elements."""
        return LEVELS / (LEVELS - self.threshold)

    def of_samples(self, first: int, stop: int) -> Dropout:
        """This dropout for some samples of the batch."""
        return replace(self, samples=self.samples[first:stop])

    def of_heads(self, first: int) -> Dropout:
        """This dropout for heads from number ``first`` on."""
        return replace(self, head=self.head + first)

    def row_keys(self, at: Tensor, heads: int | None = None) -> Tensor:
        """Keys of rows at positions ``at`` (int64 [rows]): int64 [samples, rows], or [samples, heads, rows]."""
        numbers = [None] if heads is None else range(self.head, self.head + heads)
        first = [[self._key(1, sample, head) for head in numbers] for sample in self.samples]
        keys = _hashes(to_device(torch.tensor(first), at.device)[..., None], at)
        return keys[:, 0] if heads is None else keys

    def column_keys(self, groups: Tensor) -> Tensor:
        """Keys of groups of four columns with numbers ``groups`` (int64 [groups]): int64 [samples, groups]."""
        first = [[self._key(2, sample, None)] for sample in self.samples]
        return _hashes(to_device(torch.tensor(first), groups.device), groups)

    def kept(self, rows: Tensor, columns: Tensor) -> Tensor:
        """1 for kept elements, else 0: int16 [.., rows, 4 * groups], from keys [.., rows] and [.., groups], broadcast.

        It makes four comparisons at once: the addition to the 15 bits carries into the 16th if they reach the
        threshold.
        """
        bits = _pair_hash_(rows[..., None] ^ columns[..., None, :])
        bits.bitwise_and_(_in_lanes(LEVELS - 1)).add_(_in_lanes(LEVELS - self.threshold))
        return bits.bitwise_right_shift_(15).bitwise_and_(_in_lanes(1)).view(torch.int16)

    def _key(self, *numbers: int | None) -> int:
        """A signed 64-bit number from the seed, the stream and other numbers."""
        key = _hash(self.seed & MASK)
        for number in (self.stream, *numbers):
            key = _hash(key + (0 if number is None else number + 1) * GOLDEN & MASK)
        return key - 2**64 if key >= 2**63 else key


class TileDropout:
    """Which pairs of a tile are kept, computed for a block of rows and heads at a time.

    Args:
        dropout: for this rank's samples and heads.
        heads: number of heads of the tile.
        q_at, k_at: positions of its queries and keys.
        flip: whether both are in reverse order.
    """

    def __init__(
        self, dropout: Dropout, heads: int, q_at: Spans, k_at: Spans, device: torch.device, *, flip: bool = False
    ) -> None:
        self.dropout, self.flip, self.scale = dropout, flip, dropout.scale
        self._rows = dropout.row_keys(positions(q_at, device, flip), heads)
        # For each span of keys: hash keys of its groups of four columns, its offset in the first group, its length.
        self._columns: list[tuple[Tensor, int, int]] = []
        for start, stop in k_at:
            groups = torch.arange(start // LANES, -(-stop // LANES), device=device)
            self._columns.append((dropout.column_keys(groups)[:, None], start % LANES, stop - start))

    def rows(self, start: int, end: int, keys: int, batch: slice = slice(None), heads: slice = slice(None)) -> Tensor:
        """1 for kept pairs, else 0: int16 [batch, heads, end - start, keys], of the first ``keys`` keys."""
        rows, parts = self._rows[batch, heads, start:end], []
        if len(self._columns) == 1 and not self.flip:
            (columns, first, _), stop = self._columns[0], self._columns[0][1] + keys
            return self.dropout.kept(rows, columns[batch, :, : -(-stop // LANES)])[..., first:stop]
        for columns, first, count in self._columns:
            parts.append(self.dropout.kept(rows, columns[batch])[..., first : first + count])
        kept = torch.cat(parts, -1)
        return (kept.flip(-1) if self.flip else kept)[..., :keys]


def drop(x: Tensor, dropout: Dropout, at: Tensor) -> Tensor:
    """Dropout of hidden states. Differentiable; the backward pass draws the same numbers again.

    Args:
        x: [s, b, h].
        dropout: with ``b`` samples.
        at: the global positions of the rows, int64 [s].

    Raises:
        ValueError: ``dropout`` is for another number of samples.
    """
    if len(dropout.samples) != x.size(1):
        raise ValueError(
            f"dropout.samples has {len(dropout.samples)} numbers, not {x.size(1)}: give one for each sample"
        )
    return _Drop.apply(x, dropout, at) if dropout.threshold else x


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dropout: Dropout, at: Tensor) -> Tensor:
        ctx.dropout, ctx.at = dropout, at
        return _dropped(x, dropout, at)

    @staticmethod
    @once_differentiable("dropout by positions")
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(grad, ctx.dropout, ctx.at), None, None


ELEMENTS_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}  # of hidden states; on a CPU their bits fit the cache


def _dropped(x: Tensor, dropout: Dropout, at: Tensor) -> Tensor:
    size, at = x.size(-1), to_device(at, x.device)
    rows = dropout.row_keys(at).t()  # [s, b]
    columns = dropout.column_keys(torch.arange(-(-size // LANES), device=x.device))  # [b, groups]
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    step = max(1, ELEMENTS_AT_ONCE["cpu" if x.device.type == "cpu" else "cuda"] // (size * x.size(1)))
    for start in range(0, len(at), step):
        part = slice(start, start + step)
        kept = dropout.kept(rows[part, :, None], columns)[:, :, 0, :size]
        torch.mul(x[part], kept, out=y[part]).mul_(dropout.scale)
    return y


def _in_lanes(x: int) -> int:
    """16 bits repeated four times, as a signed number."""
    x *= 0x0001000100010001
    return x - 2**64 if x >= 2**63 else x


def _hash(x: int) -> int:
    """SplitMix64's output function."""
    x = (x ^ x >> 30) * FIRST & MASK
    x = (x ^ x >> 27) * SECOND & MASK
    return x ^ x >> 31


def _hashes(key: Tensor, numbers: Tensor) -> Tensor:
    """``_hash(key + number * GOLDEN)`` for int64 tensors, broadcast."""
    x = key + numbers * GOLDEN_SIGNED
    x = (x ^ _shifted(x, 30)) * FIRST_SIGNED
    x = (x ^ _shifted(x, 27)) * SECOND_SIGNED
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """``x >> bits`` of int64 tensors as unsigned numbers."""
    return (x >> bits) & (1 << 64 - bits) - 1


def _pair_hash_(x: Tensor) -> Tensor:
    """A shorter hash, in place, of a combination of two keys, which are hashes already."""
    shifted = torch.empty_like(x)
    for factor in (FIRST_SIGNED, SECOND_SIGNED):
        x.mul_(factor)
        torch.bitwise_right_shift(x, 32, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_(2**32 - 1))
    return x
