# SPDX-License-Identifier: Apache-2.0
"""--data-path and --split as words: prefixes with or without weights, and shares; read as Megatron reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from megatron.training.refusal import Refusal

Blend = tuple[list[str], list[float] | None]  # prefixes, and their weights


def parse_blend(values: Sequence[str], flag: str) -> Blend:
    """Prefixes, or weights and prefixes in turn: an odd number of words is prefixes alone."""
    if not values:
        raise Refusal(f"{flag} is empty: give a prefix, or weights and prefixes")
    weights = [_number(word) for word in values[::2]] if len(values) % 2 == 0 else [None]
    if all(weight is None for weight in weights):
        return [word.strip() for word in values], None
    if any(weight is None for weight in weights):
        raise Refusal(f"{flag}: give prefixes alone, or a weight before each prefix: 1 PREFIX 2.5 PREFIX")
    prefixes = [word.strip() for word in values[1::2]]
    for prefix, weight in zip(prefixes, weights):
        if not (math.isfinite(weight) and weight > 0):
            raise Refusal(f"{flag}: weight {weight:g} of {prefix} must be above 0")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(split: str | None) -> str:
    """Megatron's train,valid,test shares; core would read "9,-1" as 9,1 and "0,0,0" as NaN."""
    if split is None:
        return "969,30,1"
    number = r"\s*(\d+\.?\d*|\.\d+)\s*"
    if not re.fullmatch(f"{number}(,{number}){{0,2}}", split) or not any(map(float, split.split(","))):
        raise Refusal(f"--split {split}: give up to three shares, for example 969,30,1")
    return split
