# SPDX-License-Identifier: Apache-2.0
"""Packed documents, by how long they are: how many keys a token sees on average, and how much samples differ.

A sample is documents one after the other, cut where the sample ends, as GPT datasets of Megatron-LM are. Attention
stays in a document, so its work grows with the squares of their lengths: a sample of one long document takes many times
the attention of one of short documents, and the ranks that have it keep the others waiting (WLB-LLM, arXiv:2503.17924).
"""

from __future__ import annotations

import math
import random
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean, pstdev

from megatron.simulator.planner.sizes import tokens
from megatron.training.json_file import read_bytes
from megatron.training.refusal import Refusal

INDEX = b"MMIDIDX\x00\x00"  # how an index of Megatron-LM's datasets begins
MOST_LENGTHS, MOST_TEXT = 1 << 22, 16 << 20  # that are read of a dataset; bytes of a file of lengths
LONGEST = 2**53  # tokens of a document
DRAWS = 100_000  # documents that are drawn, about: more where FEWEST samples hold more, fewer where MOST hold fewer
FEWEST, MOST = 16, 512  # samples that are packed
RINGS = (2, 4, 8, 16, 32, 64)
MICRO_BATCHES = (1, 2, 4, 8, 16)
PARTS = 2 * RINGS[-1]  # of a sample, whose pairs are counted: two for each rank of the longest ring


@dataclass(frozen=True)
class Packed:
    """Of samples: keys that a token sees on average; standard deviation of that over its mean, among samples; and what
    the busiest rank of a ring computes over the mean of its ranks, by ``RINGS`` and ``MICRO_BATCHES``."""

    keys: float
    spread: float
    uneven: tuple[tuple[float, ...], ...] = ()


@lru_cache(maxsize=64)
def packed(documents: str, seq_length: int, window: int = 0) -> Packed:
    """
    Args:
        documents: ``mean:8K`` (exponential), ``mean:8K,sigma:1.2`` (log-normal), or a file: lengths in tokens, one a
            line, or the .idx of a dataset; empty: a sample is one document.
        window: keys that a query sees at most; 0: all before it.

    Raises:
        Refusal: it is none of these.
    """
    if not documents:
        return Packed(_keys(seq_length, window) / seq_length, 0.0)
    draw, mean = _lengths(documents)
    count = max(FEWEST, min(MOST, int(DRAWS * mean / seq_length)))
    bounds = [seq_length * part // PARTS for part in range(1, PARTS + 1)]
    left, samples = 0, []
    for _ in range(count):
        start, total, before, parts = 0, 0.0, 0.0, []
        while start < seq_length:
            left = left or draw()
            end = min(start + left, seq_length)
            while len(parts) < PARTS and bounds[len(parts)] <= end:
                so_far = total + _keys(bounds[len(parts)] - start, window)
                parts.append(so_far - before)
                before = so_far
            total += _keys(end - start, window)
            left, start = left - (end - start), end
        samples.append(parts)
    pairs = [sum(parts) / seq_length for parts in samples]
    keys = fmean(pairs)
    return Packed(keys, pstdev(pairs) / keys, _uneven(samples, zigzag=not window))


def _uneven(samples: list[list[float]], *, zigzag: bool) -> tuple[tuple[float, ...], ...]:
    """A ring waits for its busiest rank in each micro-batch: the mean over micro-batches of the most pairs over the
    mean's.

    Documents of one sample are dealt so that all have as many (layout/documents.py); several samples go round in
    zigzag, since each would be dealt in its own way, and a window's in contiguous parts, as the program settles it.
    """
    table = []
    for ring in RINGS:
        wide = PARTS // (2 * ring)
        ranks = [  # pairs of each rank, of each sample
            [
                sum(parts[rank * wide : (rank + 1) * wide])
                + sum(parts[(2 * ring - 1 - rank) * wide : (2 * ring - rank) * wide])
                if zigzag
                else sum(parts[2 * rank * wide : 2 * (rank + 1) * wide])
                for rank in range(ring)
            ]
            for parts in samples
        ]
        row = []
        for batch in MICRO_BATCHES:
            if batch == 1 and zigzag:
                row.append(1.0)
                continue
            together = [  # samples that follow each other, the first after the last
                [sum(of_rank) for of_rank in zip(*(ranks[(first + i) % len(ranks)] for i in range(batch)))]
                for first in range(len(ranks))
            ]
            row.append(sum(map(max, together)) * ring / sum(map(sum, together)))
        table.append(tuple(row))
    return tuple(table)


def _keys(length: int, window: int) -> float:
    """Pairs of a document of ``length`` tokens."""
    if not window or window >= length:
        return length * (length + 1) / 2
    return window * (window + 1) / 2 + (length - window) * window


def _lengths(text: str) -> tuple[Callable[[], int], float]:
    """What draws a document's length, the same ones each time; and their mean."""
    chance = random.Random(0)
    if text.startswith("mean:"):
        given = dict(part.partition(":")[::2] for part in text.split(","))
        if not {"mean", "sigma"} >= set(given):
            raise Refusal(f"--documents {text}: give mean:N, mean:N,sigma:S, or a file")
        mean = tokens(given["mean"], "--documents mean:")
        if "sigma" not in given:
            return lambda: max(1, round(chance.expovariate(1 / mean))), float(mean)
        try:
            sigma = float(given["sigma"])
        except ValueError:
            sigma = math.nan
        if not 0 < sigma <= 5:
            raise Refusal(f"--documents {text}: sigma is of the logarithm of lengths, above 0 and at most 5")
        middle = math.log(mean) - sigma * sigma / 2
        return lambda: max(1, round(chance.lognormvariate(middle, sigma))), float(mean)
    found = read_lengths(Path(text))
    return lambda: chance.choice(found), fmean(found)


def read_lengths(path: Path) -> list[int]:
    """Lengths of a file's documents.

    Raises:
        Refusal: it cannot be read, is cut short, or holds no lengths.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(INDEX)) == INDEX:
                _, _, sequences, _ = struct.unpack("<QBQQ", file.read(25))
                there = (path.stat().st_size - file.tell()) // 4
                if sequences > there:
                    raise Refusal(
                        f"--documents {path}: says that it has {sequences:,} lengths, but has room for {there:,}: it "
                        "was cut short or is damaged, write it again"
                    )
                found, start, runs = array("i"), file.tell(), -(-sequences // MOST_LENGTHS)
                for run in range(runs):  # of more than that, as many runs from all over the file
                    file.seek(start + 4 * (sequences * run // runs))
                    found.frombytes(file.read(4 * (min(sequences, MOST_LENGTHS) // runs)))
            else:
                found = [int(line) for line in read_bytes(path, MOST_TEXT).split()]
    except OSError as error:
        raise Refusal(f"--documents {path}: cannot be read: {error.strerror or error}") from None
    except Refusal:
        raise  # it is a ValueError as well
    except (ValueError, struct.error):
        raise Refusal(f"--documents {path}: give lengths in tokens, one a line, or the .idx of a dataset") from None
    found = [length for length in found if 0 < length <= LONGEST]
    if not found:
        raise Refusal(f"--documents {path}: holds no lengths above 0")
    return found
