# SPDX-License-Identifier: Apache-2.0
"""Counts, sizes and times as people write them."""

from __future__ import annotations

import re

from megatron.training.refusal import Refusal

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def tokens(text: str, flag: str) -> int:
    """A count, such as ``120K`` (K = 1024, M = 1024 K).

    Raises:
        Refusal: it is none, or not above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip().replace(",", ""))
    size = float(found[1]) * {"": 1, "k": 2**10, "m": 2**20}[found[2].lower()] if found else 0.0
    if size < 1 or size % 1 or size > 2**40:
        raise Refusal(f"{flag} {text}: give a whole number above 0, such as 122880 or 120K")
    return int(size)


def big_number(text: str, flag: str) -> float:
    """A count of a run's tokens, such as ``1.5T`` (K, M, B or G, T are powers of 1000).

    Raises:
        Refusal: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmbgt]?)", text.strip().lower().replace(",", ""))
    size = float(found[1]) * 10.0 ** {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}[found[2]] if found else 0.0
    if not 1 <= size < 1e18:
        raise Refusal(f"{flag} {text}: give a number above 0, such as 300B or 1.5T (powers of 1000)")
    return size


def seconds(text: str, flag: str) -> float:
    """A time, such as ``36h``, ``30d``, ``2w``.

    Raises:
        Refusal: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    if not found or not float(found[1]):
        raise Refusal(f"{flag} {text}: give a time above 0, such as 90m, 36h, 30d or 2w")
    return float(found[1]) * SECONDS[found[2]]


def share_of_memory(text: str, whole: float, flag: str) -> float:
    """Bytes, as ``2GiB`` or ``3%`` of ``whole``.

    Raises:
        Refusal: neither, or as much as there is.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%|gib|g)", text.strip().lower())
    size = float(found[1]) * (whole / 100 if found[2] == "%" else 2**30) if found else -1.0
    if not 0 <= size < whole:
        raise Refusal(f"{flag} {text}: give a part of the GPU's memory, such as 2GiB or 3%")
    return size
