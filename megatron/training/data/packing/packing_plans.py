# SPDX-License-Identifier: Apache-2.0
"""Plans of samples: which pieces of which documents are in each sample. The same for every grid.

``best-fit`` cuts only documents that are longer than a sample, and puts each piece into the fullest sample that has
room for it, the longest pieces first (Ding et al., Fewer Truncations Improve Language Modeling, arXiv 2404.10830).
``by-work`` puts each piece into the sample with the least attention work that has room, and then makes global batches
of samples with similar work (the imbalance is that of WLB-LLM, arXiv 2503.17924). Both work on one window of the
shuffled documents at a time. A piece is in the samples of its own window or of the next one.

The shuffled documents of all epochs are one stream of tokens. With --seq-length-schedule each stage makes its samples
of the documents that begin in its own interval of the stream; ``greedy`` cuts the stream itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

from megatron.training.refusal import Refusal

SURPLUS = BlendedMegatronDatasetConfig.mid_level_dataset_surplus  # core draws so many more samples than it blends

SPARSE = 0.9  # samples of a window with a smaller fill are taken apart, and their pieces go to the next window


@dataclass(frozen=True)
class Packing:
    """How samples are made.

    Args:
        kind: "best-fit" or "by-work"; "greedy" for the stages of a schedule of lengths.
        window: samples that are planned together; "by-work" rounds up to whole batches.
        batch: samples of a global batch, for "by-work".
    """

    kind: str
    window: int
    batch: int = 1


Blended = Sequence[tuple[int, float]]  # (number of documents, weight) of sources that are one after another


@dataclass(frozen=True)
class PackingPlan:
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
    documents: np.ndarray, lengths: np.ndarray, length: int, samples: int | None, packing: Packing, seed: int,
    blend: Blended | None = None,
) -> PackingPlan:  # fmt: skip
    """Samples of ``length + 1`` tokens, of documents that are shuffled in every epoch.

    Args:
        documents: the documents to read, with repetitions [n].
        lengths: tokens of each of them [n].
        samples: at least so many; None for one epoch.
        seed: of the order.
        blend: several sources, of which every window has these shares; samples mix their documents.

    Raises:
        ValueError: a source has no token.
    """
    pack = _best_fit
    if packing.kind == "by-work":  # a window that is no multiple of the batch would move all later batches
        pack, packing = _by_work, replace(packing, window=-(-packing.window // packing.batch) * packing.batch)
    made: list[list[np.ndarray]] = []
    late = np.empty((0, 3), np.int64)  # pieces that their own window had no room for
    tokens = packing.window * (length + 1)
    streams = [
        _windows(*source, length, samples is None, tokens * share, seed, number)
        for number, (source, share) in enumerate(_sources(documents, lengths, blend))
    ]
    for window, parts in enumerate(zip_longest(*streams, fillvalue=(late[:0], True))):
        pieces, last = np.concatenate([pieces for pieces, _ in parts]), all(last for _, last in parts)
        bins, later = pack(late, pieces, length + 1, max(packing.window * (window + 1) - len(made), 1), last)
        made += _ordered(bins, packing, np.random.default_rng([seed, 1, window]))
        late = later
        if samples is not None and len(made) >= samples:
            break
    counts = np.fromiter(map(len, made), np.int64, len(made))
    return PackingPlan(np.concatenate(made), np.append(0, np.cumsum(counts)))


def _sources(
    documents: np.ndarray, lengths: np.ndarray, blend: Blended | None
) -> list[tuple[tuple[np.ndarray, np.ndarray], float]]:
    """For each source, its documents and their lengths without empty ones, and its share of the tokens."""
    found, begin = [], 0
    blend = blend or [(len(documents), 1.0)]
    for count, weight in blend:
        kept = begin + np.flatnonzero(lengths[begin : begin + count] > 0)
        if not len(kept):
            raise ValueError("no document has a token")
        found.append(((documents[kept], lengths[kept]), weight / sum(weight for _, weight in blend)))
        begin += count
    return found


def _windows(
    documents: np.ndarray, lengths: np.ndarray, length: int, once: bool, tokens: float, seed: int, source: int
) -> Iterator[tuple[np.ndarray, bool]]:
    """(pieces of a source, whether they are its last) of each window, which together never exceed ``tokens`` each."""
    rest, window, epoch, before = np.empty((0, 3), np.int64), 1, 0, 0
    while True:
        order = np.random.default_rng([seed, 0, epoch, source]).permutation(len(documents))
        pieces = np.concatenate([rest, cut(documents[order], lengths[order], length)])
        ends = before + np.cumsum(pieces[:, 2])
        start = 0
        while ends[-1] > tokens * window:
            stop = int(np.searchsorted(ends, tokens * window, side="right"))
            yield pieces[start:stop], False
            start, window = stop, window + 1
        before = int(ends[start - 1]) if start else before
        rest, epoch = pieces[start:], epoch + 1
        if once:
            yield rest, True
            return


def best_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Sort items into bins of size ``capacity`` by best-fit decreasing; returns the items of each bin.

    Args:
        sizes: of each item [n], at most ``capacity``.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, number of the bin), ascending
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(free, (size, -1))
        if at == len(free):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = free.pop(at)
        bins[number].append(item)
        if room > size:
            insort(free, (room - size, number))
    return bins


def _best_fit(
    late: np.ndarray, pieces: np.ndarray, capacity: int, count: int, last: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """Pieces of each sample, and the pieces for the next window; of those that are late already there are none."""
    every = np.concatenate([late, pieces])
    kept: list[np.ndarray] = []
    later: list[int] = []
    for one in best_fit(every[:, 2], capacity):
        room = capacity - every[one, 2].sum()
        if not last and room > (1 - SPARSE) * capacity and min(one) >= len(late):
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
    for piece in np.argsort(-every[:, 2], kind="stable").tolist():
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


def greedy_plan(documents: np.ndarray, lengths: np.ndarray, length: int) -> PackingPlan:
    """Megatron-LM's stream as a plan, to compare with: documents in order, cut wherever a sample ends."""
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    return _cut_stream(documents, lengths, begins, np.arange((int(lengths.sum()) - 1) // length) * length, length)


def _cut_stream(
    documents: np.ndarray, lengths: np.ndarray, begins: np.ndarray, starts: np.ndarray, length: int
) -> PackingPlan:
    """Samples of ``length + 1`` tokens of a stream, each with the pieces of documents that it covers.

    Args:
        documents, lengths, begins: of the stream in order: numbers, tokens, and places of their first tokens [n].
        starts: place of the first token of each sample [samples].
    """
    first = np.searchsorted(begins, starts, side="right") - 1
    counts = np.searchsorted(begins, starts + length, side="right") - first
    at = np.append(0, np.cumsum(counts))
    owner = np.repeat(np.arange(len(starts)), counts)
    place = first[owner] + np.arange(len(owner)) - at[owner]
    begin = np.maximum(starts[owner] - begins[place], 0)
    sizes = np.minimum(starts[owner] + length + 1 - begins[place], lengths[place]) - begin
    return PackingPlan(np.stack([documents[place], begin, sizes], 1).astype(np.int64), at)


def stage_plan(
    documents: np.ndarray, lengths: np.ndarray, length: int, samples: int, packing: Packing, seed: int,
    first: Sequence[int], blend: Blended | None = None,
) -> PackingPlan:  # fmt: skip
    """Samples of one stage of a schedule of lengths: those of :func:`stage_tokens` tokens of the stream from ``first``.

    ``greedy`` cuts this interval in samples and shuffles them. The others plan the documents that begin in it, in
    windows of equal size. A few documents may be read twice to fill the last samples, or fit in none.

    Args:
        documents, lengths, length, seed, blend: as in :func:`make_plan`.
        samples: of the stage; the plan may have a few more.
        first: for each source, the token of its stream at which the interval begins.
    """
    own, counts = [], []
    for number, ((documents_, lengths_), share) in enumerate(_sources(documents, lengths, blend)):
        total, begin = int(lengths_.sum()), first[number]
        stop = begin + stage_tokens(math.ceil(samples * share), length, packing)
        epochs = range(begin // total, stop // total + 2)  # one more, if no document begins in the interval
        order = np.concatenate(
            [np.random.default_rng([seed, 0, epoch, number]).permutation(len(lengths_)) for epoch in epochs]
        )
        begins = np.cumsum(lengths_[order], dtype=np.int64) - lengths_[order] + epochs[0] * total
        if packing.kind == "greedy":
            starts = begin + length * np.random.default_rng([seed, 3, begin]).permutation(samples)
            return _cut_stream(documents_[order], lengths_[order], begins, starts, length)
        one, end = np.searchsorted(begins, [begin, stop])
        inside = order[one : max(end, one + 1)]
        own.append((documents_[inside], lengths_[inside]))
        counts.append((len(inside), share))
    equal = replace(packing, window=-(-samples // -(-samples // packing.window)))
    return make_plan(*map(np.concatenate, zip(*own)), length, samples, equal, seed, counts)


def stage_starts(
    earlier: Sequence[tuple[int, int]], packing: Packing, sources: Sequence[str], weights: Sequence[float] | None
) -> dict[str, int]:
    """The token of each source's stream at which a stage begins, after all that was drawn for the earlier ones.

    Of a blend in ``greedy``, core draws slightly more than it reads; what is left is read in no stage.

    Args:
        earlier: (samples, tokens of each) of every earlier stage.
        weights: of the sources; None for one source, of which all samples are.

    Raises:
        Refusal: several sources without weights, which are read once.
    """
    if weights is None and len(sources) > 1:
        raise Refusal("--seq-length-schedule reads parts of a blend by weight: give weights, --data-path 1 PREFIX ...")
    surplus = SURPLUS if weights is not None and packing.kind == "greedy" else 0.0
    shares = [1.0] if weights is None else [weight / sum(weights) for weight in weights]
    return {
        source: sum(
            stage_tokens(math.ceil(math.ceil(samples * share) * (1 + surplus)), length, packing)
            for samples, length in earlier
        )
        for source, share in zip(sources, shares)
    }


def stage_tokens(samples: int, length: int, packing: Packing) -> int:
    """Tokens of the stream that belong to so many samples. In ``greedy``, a sample begins with the last one's end."""
    return samples * (length if packing.kind == "greedy" else length + 1)


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


def cost_of(plan: PackingPlan, lengths: np.ndarray, length: int, batch: int, linear: float = 0.0) -> Cost:
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
