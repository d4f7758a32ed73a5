# SPDX-License-Identifier: Apache-2.0
"""How keys and values travel between the ranks of a ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class KeyExchange:
    """One way, as a name of ``--cp-comm-type``.

    Attributes:
        says: what it does, for ``--help``.
        source: "module:class" in context_parallel/attention/, a :class:`KeySource` of ring.py.
        work: module in simulator/cost/kinds/ with ``ring_forward`` and ``ring_backward``.
        held: memory that the backward pass needs beyond that on one rank, in units of a rank's keys and values, by the
            size of the ring and by how many times as large as a key its gradient's sum is. None:
            formulas/kinds/attention_figures.py has it.
        in_chunks: keys can be sent chunk by chunk, as FPDT does.
    """

    says: str
    source: str
    work: str
    held: Callable[[int, int], int] | None = None
    in_chunks: bool = False


def _gathered(ring: int, wide: int) -> int:
    """All keys, and this rank's as they are sent; sums of all gradients, and packed for sending."""
    return ring + 1 + 2 * ring * wide


PASSED_ON = "p2p"
# Every exchange. To add one, write its source and its work, and add a line here.
KEY_EXCHANGES = {
    PASSED_ON: KeyExchange("is Ring", "ring:RingSource", "ring_operations", in_chunks=True),
    "all_gather": KeyExchange(
        "is Ring that gathers all keys at once", "ring:GatherSource", "gathered_operations", _gathered
    ),
}
