# SPDX-License-Identifier: Apache-2.0
"""Blends by source and by length: the YAML file of --data-config.

    sources:
      - path: my/books
        weight: 2
        repeat: {8K: 2, 64K: 5}
      - path: my/web
        weight: 1

A source's documents of at least 8,192 tokens are read twice in each of its epochs, those of at least 65,536 five times,
and shorter ones once. A factor may be a fraction: 0.25 reads a quarter of these documents, drawn by the seed. Weights
are shares of samples, as in --data-path, so that repeating long documents leaves the sources' shares as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from megatron.training.arguments.schedule import tokens_in
from megatron.training.json_file import read_text
from megatron.training.refusal import Refusal, one_line, short

MOST_BYTES = 1 << 20
MOST_REPEATS = 1000.0


@dataclass(frozen=True)
class Source:
    """One source: its prefix, its weight, and by the fewest tokens of a document, ascending, how often it is read."""

    path: str
    weight: float
    repeat: tuple[tuple[int, float], ...] = ()


class _Loader(yaml.SafeLoader):
    """Plain values only, without aliases: a small file could otherwise stand for a huge value."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name): write the value out")
        if self.depth >= 20:
            raise yaml.YAMLError("it is nested more than 20 deep")
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    depth = 0


def read_mixture(path: str) -> list[Source]:
    """The sources of a --data-config file.

    Raises:
        Refusal: it cannot be read, or has something else than sources; the message names the source and the key.
    """
    flag, text = f"--data-config {path}", read_text(path, "--data-config", MOST_BYTES)
    try:
        content = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Refusal(f"{flag}: not YAML: {one_line(error, 200)}") from None
    sources = content.get("sources") if isinstance(content, dict) else None
    if not isinstance(sources, list) or not sources or set(content) != {"sources"}:
        raise Refusal(f"{flag}: must have one key, sources, with a list of path, weight and repeat")
    result = [_source(source, f"{flag}: source {number}") for number, source in enumerate(sources, 1)]
    paths = [source.path for source in result]
    if len(set(paths)) < len(paths):
        raise Refusal(f"{flag}: {max(paths, key=paths.count)} is named twice")
    return result


def _source(content: Any, where: str) -> Source:
    if not isinstance(content, dict) or not {"path"} <= set(content) <= {"path", "weight", "repeat"}:
        raise Refusal(f"{where}: must have path, and may have weight and repeat, not {short(content)}")
    path, weight, repeat = content["path"], content.get("weight", 1), content.get("repeat", {})
    if not isinstance(path, str) or not path.strip():
        raise Refusal(f"{where}: path must be a prefix, not {short(path)}")
    if type(weight) not in (int, float) or not 0 < weight < 1e9:
        raise Refusal(f"{where}: weight must be a positive number, not {short(weight)}")
    if not isinstance(repeat, dict):
        raise Refusal(f"{where}: repeat must be like {{8K: 2, 64K: 4}}, not {short(repeat)}")
    steps = []
    for least, factor in repeat.items():
        if type(factor) not in (int, float) or not 0 <= factor <= MOST_REPEATS:
            raise Refusal(f"{where}: repeat {short(least)} must be from 0 to {MOST_REPEATS:g}, not {short(factor)}")
        tokens = tokens_in(str(least))
        if tokens is None:
            raise Refusal(f"{where}: repeat {short(least)}: must be tokens such as 8192, 8K or 1M")
        steps.append((tokens, float(factor)))
    if len({least for least, _ in steps}) < len(steps):
        raise Refusal(f"{where}: repeat has one length twice")
    return Source(path, float(weight), tuple(sorted(steps)))


def repeated(
    documents: np.ndarray, lengths: np.ndarray, repeat: tuple[tuple[int, float], ...], seed: int
) -> np.ndarray:
    """The documents of an epoch, each as often as its length says, in the order given.

    Args:
        documents: their numbers, of any integer dtype [n].
        lengths: tokens of each [n].
        repeat: by the fewest tokens of a document, ascending, how often it is read; shorter ones once.
    """
    if not repeat:
        return documents
    steps = np.array([0, *(least for least, _ in repeat)])
    factors = np.array([1.0, *(factor for _, factor in repeat)])
    factor = factors[np.searchsorted(steps, lengths, side="right") - 1]
    whole = np.floor(factor)
    draw = np.random.default_rng([seed, 2]).random(len(documents))
    return np.repeat(documents, (whole + (draw < factor - whole)).astype(np.int64))
