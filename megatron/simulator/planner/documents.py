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
from megatron.training.refusal import Refusal

INDEX = b"MMIDIDX\x00\x00"  # how an index of Megatron-LM's datasets begins
DRAWS = 100_000  # documents at most that are drawn
FEWEST, MOST = 16, 512  # samples that are packed


@dataclass(frozen=True)
class Packed:
    """Of samples: keys that a token sees on average; standard deviation of that over its mean, among samples."""

    keys: float
    spread: float


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
    left, pairs = 0, []
    for _ in range(count):
        room, total = seq_length, 0.0
        while room:
            left = left or draw()
            part = min(left, room)
            total += _keys(part, window)
            left, room = left - part, room - part
        pairs.append(total / seq_length)
    keys = fmean(pairs)
    return Packed(keys, pstdev(pairs) / keys)


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
        Refusal: it cannot be read, or holds no lengths.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(INDEX)) == INDEX:
                _, _, sequences, _ = struct.unpack("<QBQQ", file.read(25))
                sizes = array("i")
                sizes.frombytes(file.read(4 * sequences))
                found = list(sizes)
            else:
                found = [int(line) for line in path.read_text().split()]
    except OSError as error:
        raise Refusal(f"--documents {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, struct.error):
        raise Refusal(f"--documents {path}: give lengths in tokens, one a line, or the .idx of a dataset") from None
    found = [length for length in found if length > 0]
    if not found:
        raise Refusal(f"--documents {path}: holds no lengths above 0")
    return found
