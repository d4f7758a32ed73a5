# SPDX-License-Identifier: Apache-2.0
"""Plans of samples: which pieces of which documents are in each sample. The same for every grid.

``best-fit`` cuts only documents that are longer than a sample, and puts each piece into the fullest sample that has
room for it, the longest pieces first (Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830).
``by-work`` puts each piece into the sample with the least attention work that has room, and then makes global batches
of samples with similar work (the imbalance is that of WLB-LLM, arXiv 2503.17924). Both work on one window of the
shuffled documents at a time. A piece is in the samples of its own window or of the next one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SPARSE = 0.9  # samples of a window with a smaller fill are taken apart, and their pieces go to the next window


@dataclass(frozen=True)
class Packing:
    """How samples are made.

    Args:
        kind: "best-fit" or "by-work".
        window: samples that are planned together.
        batch: samples of a global batch, for "by-work".
    """

    kind: str
    window: int
    batch: int = 1


@dataclass(frozen=True)
class Plan:
    """Samples of pieces.

    Args:
        pieces: (document, first token, tokens) of each piece, int64 [pieces, 3].
        first: the first piece of each sample, and the number of pieces, int64 [samples + 1].
    """

    pieces: np.ndarray
    first: np.ndarray

    def tokens(self) -> np.ndarray:
        """Tokens of each sample, int64 [samples]."""
        return np.add.reduceat(self.pieces[:, 2], self.first[:-1])

    def work(self) -> np.ndarray:
        """(query, key) pairs of each sample, if documents do not attend to each other; float64 [samples]."""
        sizes = self.pieces[:, 2].astype(np.float64)
        return np.add.reduceat(sizes * (sizes + 1) / 2, self.first[:-1])


def cut(documents: np.ndarray, lengths: np.ndarray, length: int) -> np.ndarray:
    """The pieces of documents: (document, first token, tokens), int64 [pieces, 3].

    Each piece has at most ``length + 1`` tokens. The first token of a further piece is the last one of the piece before
    it, so that every token but the first of a document is predicted once.

    Args:
        documents: their numbers [n].
        lengths: tokens of each [n], positive.
        length: tokens of a sample.
    """
    counts = np.maximum(-(-(lengths.astype(np.int64) - 1) // length), 1)
    owner = np.repeat(np.arange(len(documents)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = within * length
    sizes = np.minimum(lengths[owner] - begin, length + 1)
    return np.stack([documents[owner], begin, sizes], 1).astype(np.int64)


def make_plan(
    documents: np.ndarray, lengths: np.ndarray, length: int, samples: int | None, packing: Packing, seed: int
) -> Plan:
    """Samples of ``length + 1`` tokens, of documents that are shuffled in every epoch.

    Args:
        documents: the documents to read, with repetitions [n].
        lengths: tokens of each of them [n].
        samples: at least so many; None for one epoch.
        seed: of the order.

    Raises:
        ValueError: there is no token.
    """
    documents, lengths = documents[lengths > 0], lengths[lengths > 0]
    if not len(documents):
        raise ValueError("no document has a token")
    pack = _by_work if packing.kind == "by-work" else _best_fit
    made: list[list[np.ndarray]] = []
    late = np.empty((0, 3), np.int64)  # pieces that their own window had no room for
    target = 0
    for window, pieces, last in _windows(documents, lengths, length, samples is None, packing, seed):
        target = packing.window * (window + 1)
        bins, later = pack(late, pieces, length + 1, max(target - len(made), 1), last)
        made += _ordered(bins, packing, np.random.default_rng([seed, 1, window]))
        late = later
        if samples is not None and len(made) >= samples:
            break
    counts = np.fromiter(map(len, made), np.int64, len(made))
    return Plan(np.concatenate([np.concatenate(one) for one in _grouped(made)]), np.append(0, np.cumsum(counts)))


def _grouped(made: list[np.ndarray], size: int = 4096) -> Iterator[list[np.ndarray]]:
    for start in range(0, len(made), size):
        yield made[start : start + size]


def _windows(
    documents: np.ndarray, lengths: np.ndarray, length: int, once: bool, packing: Packing, seed: int
) -> Iterator[tuple[int, np.ndarray, bool]]:
    """(number, pieces, whether it is the last) of each window: pieces with about as many tokens as its samples."""
    budget, window, epoch = packing.window * (length + 1), 0, 0
    rest = np.empty((0, 3), np.int64)
    while True:
        order = np.random.default_rng([seed, 0, epoch]).permutation(len(documents))
        pieces = np.concatenate([rest, cut(documents[order], lengths[order], length)])
        ends = np.cumsum(pieces[:, 2])
        start = 0
        while ends[-1] - (ends[start - 1] if start else 0) > budget:
            stop = int(np.searchsorted(ends, (ends[start - 1] if start else 0) + budget, side="right"))
            stop = max(stop, start + 1)
            yield window, pieces[start:stop], False
            start, window = stop, window + 1
        rest, epoch = pieces[start:], epoch + 1
        if once:
            yield window, rest, True
            return


Bins = list[list[np.ndarray]]


def _best_fit(
    late: np.ndarray, pieces: np.ndarray, capacity: int, count: int, last: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Pieces of each sample, and the pieces for the next window; of those that are late already there are none."""
    every = np.concatenate([late, pieces])
    sizes = every[:, 2].tolist()
    order = np.lexsort((np.arange(len(every)), -every[:, 2])).tolist()
    free: list[tuple[int, int]] = []  # (room, number of the sample), ascending
    members: list[list[int]] = []
    for piece in order:
        size = sizes[piece]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            members.append([piece])
            room, number = capacity - size, len(members) - 1
        else:
            room, number = free.pop(at)
            members[number].append(piece)
            room -= size
        if room > 0:
            insort(free, (room, number))
    rooms = dict.fromkeys(range(len(members)), 0) | {number: room for room, number in free}
    kept: list[np.ndarray] = []
    later: list[int] = []
    for number, one in enumerate(members):
        if not last and rooms[number] > (1 - SPARSE) * capacity and min(one) >= len(late):
            later += one
        else:
            kept.append(every[sorted(one)])
    return kept, every[sorted(later)]


def _by_work(
    late: np.ndarray, pieces: np.ndarray, capacity: int, count: int, last: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """As :func:`_best_fit`, into ``count`` samples; more only for late pieces that fit nowhere, and at the end."""
    every = np.concatenate([late, pieces])
    count = min(count, -(-int(every[:, 2].sum()) // capacity)) if last else count
    room, work = np.full(count, capacity, np.int64), np.zeros(count)
    members: list[list[int]] = [[] for _ in range(count)]
    later: list[int] = []
    for piece in np.lexsort((np.arange(len(every)), -every[:, 2])).tolist():
        size = int(every[piece, 2])
        fits = room >= size
        if fits.any():
            number = int(np.where(fits, work, np.inf).argmin())
        elif piece >= len(late) and not last:
            later.append(piece)
            continue
        else:
            number = len(members)
            members.append([])
            room, work = np.append(room, capacity), np.append(work, 0.0)
        members[number].append(piece)
        room[number] -= size
        work[number] += size * (size + 1) / 2
    return [every[sorted(one)] for one in members if one], every[sorted(later)]


def _ordered(bins: list[np.ndarray], packing: Packing, draw: np.random.Generator) -> list[np.ndarray]:
    """The order of a window's samples: shuffled; by work, in global batches of similar work that are shuffled."""
    if packing.kind != "by-work":
        return [bins[number] for number in draw.permutation(len(bins))]
    work = np.array([(one[:, 2].astype(float) ** 2).sum() for one in bins])
    ranked = np.argsort(-work, kind="stable")
    batches = [ranked[start : start + packing.batch] for start in range(0, len(bins), packing.batch)]
    whole = [batch for batch in batches if len(batch) == packing.batch]
    order = [whole[number] for number in draw.permutation(len(whole))] + batches[len(whole) :]
    return [bins[number] for batch in order for number in batch]


def greedy_plan(documents: np.ndarray, lengths: np.ndarray, length: int) -> Plan:
    """Megatron-LM's stream as a plan, to compare with: documents in order, cut wherever a sample ends."""
    ends = np.cumsum(lengths.astype(np.int64))
    samples = int(ends[-1] - 1) // length
    pieces, first = [], [0]
    for sample in range(samples):
        begin, stop = sample * length, sample * length + length + 1
        at = int(np.searchsorted(ends, begin, side="right"))
        while begin < stop:
            size = min(int(ends[at]), stop) - begin
            pieces.append((documents[at], begin - (ends[at] - lengths[at]), size))
            begin, at = begin + size, at + 1
        first.append(len(pieces))
    return Plan(np.array(pieces, np.int64).reshape(-1, 3), np.array(first, np.int64))


@dataclass(frozen=True)
class Cost:
    """What a plan costs.

    Args:
        fill: share of the samples' tokens that are not padding.
        cut_short: share of the documents no longer than a sample that are cut.
        imbalance: mean over global batches of the slowest sample's work over the mean of its batch.
    """

    fill: float
    cut_short: float
    imbalance: float


def cost_of(plan: Plan, lengths: np.ndarray, length: int, batch: int, linear: float = 0.0) -> Cost:
    """The cost of a plan with a sample on each of ``batch`` ranks.

    Args:
        lengths: tokens of all documents, by number.
        linear: work of a token in layers other than attention, in (query, key) pairs; each sample computes all tokens.
    """
    work = plan.work() + linear * length
    whole = work[: len(work) // batch * batch].reshape(-1, batch)
    imbalance = float((whole.max(1) / whole.mean(1)).mean()) if len(whole) else 1.0
    documents, begin, sizes = plan.pieces.T
    short = lengths[documents] <= length + 1
    parts = short & ((begin > 0) | (sizes < lengths[documents]))
    cut_documents, all_short = len(np.unique(documents[parts])), len(np.unique(documents[short]))
    return Cost(float(plan.tokens().sum() / (len(work) * (length + 1))), cut_documents / max(all_short, 1), imbalance)
