# SPDX-License-Identifier: Apache-2.0
"""How states of linear attention go from span to span: by which exchange, and how many bytes each one sends.

gather: all ranks gather the maps of all spans, and each composes what it needs. One message, but maps are larger than
states, and a rank gets those of all ranks. relay: a state goes from each span to the next one. Little is sent, but one
message waits for the other. heads: an all-to-all over heads around one of these over the ring alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.decisions.division import head_plan

LINEAR_KERNELS = ("auto", "fla", "triton", "blocks")
EXCHANGES = ("auto", "gather", "relay", "heads")
SEGMENT = 2**23  # elements of q, k and v of a span that are computed together
FLA_SEGMENT = 2**28  # the same for fla's kernels, whose backward pass needs about 8 bytes for each in bf16
STATES = 2**27  # elements of a segment's states that the kernels for rules without a delta keep, 2 bytes each in bf16
BLOCK, KERNEL_BLOCK = 64, 32  # tokens of a block, powers of two: by PyTorch, and as many as registers hold
LARGEST_KEYS = 128  # of a head, of which a kernel holds a state
HOP_BYTES = 2**20  # bytes that a link sends in the latency of one message: about 20 us at 50 GB/s


@dataclass(frozen=True)
class SpanCounts:
    """How the spans of a layout hang together, over some ranks.

    Attributes:
        ranks: how many ranks exchange.
        slots: the largest number of one rank's spans whose state a later span needs.
        hops: how often the state goes to another rank, one after the other.
        sent: how often it leaves the rank that sends most.
    """

    ranks: int
    slots: int
    hops: int
    sent: int


@dataclass(frozen=True)
class StateSizes:
    """Sizes of one layer's states and inputs.

    Attributes:
        batch, heads, key_heads, keys, values: of q [s, b, key_heads, keys] and v [s, b, heads, values].
        map_columns: columns of M in a span's map: 1, or as many as ``keys`` for a delta rule.
        gates: elements of g and beta of one head and token.
        rows: tokens of a rank.
        itemsize: bytes of an element of q, k and v; states have at least 4.
        gate_itemsize: of g and beta.
    """

    batch: int
    heads: int
    key_heads: int
    keys: int
    values: int
    map_columns: int
    gates: int
    rows: int
    itemsize: int
    gate_itemsize: int = 4

    @property
    def state(self) -> int:
        """Bytes of a state, all samples and heads."""
        return self.batch * self.heads * self.keys * self.values * max(self.itemsize, 4)

    @property
    def map(self) -> int:
        """Bytes of a span's map."""
        return self.state // self.values * (self.values + self.map_columns)


def gather_bytes(sizes: StateSizes, counts: SpanCounts) -> int:
    """Bytes that a rank sends in a forward pass; the backward pass sends as many."""
    return (counts.ranks - 1) * counts.slots * sizes.map


def relay_bytes(sizes: StateSizes, counts: SpanCounts) -> int:
    """Bytes that the rank with most sends in a forward pass; the backward pass sends as many."""
    return counts.sent * sizes.state


def heads_bytes(sizes: StateSizes, ulysses: int, sent_key_heads: int) -> int:
    """Bytes that a rank sends in the two all-to-alls of a forward pass; a backward pass sends as many.

    Args:
        sent_key_heads: key heads that are sent to all ranks together, more than ``key_heads`` if some are replicated.
    """
    token = 2 * sent_key_heads * sizes.keys + 2 * sizes.heads * sizes.values
    gates = sizes.heads * sizes.gates * sizes.gate_itemsize
    return sizes.rows * sizes.batch * (token * sizes.itemsize + gates) * (ulysses - 1) // ulysses


def cheaper_exchange(sizes: StateSizes, counts: SpanCounts) -> tuple[str, int]:
    """gather or relay, and its price: the bytes that pass one after the other, and ``HOP_BYTES`` for each message."""
    if not counts.hops:
        return "gather", 0
    gather = gather_bytes(sizes, counts) + HOP_BYTES
    relay = counts.hops * (sizes.state + HOP_BYTES)
    return ("gather", gather) if gather <= relay else ("relay", relay)


def chosen_exchange(
    sizes: StateSizes, counts: SpanCounts, ring_counts: SpanCounts, ulysses: int, exchange: str = "auto"
) -> tuple[bool, str]:
    """(whether an all-to-all over heads is made, how states go then: gather or relay).

    Args:
        counts: over all context ranks; ``ring_counts``: over the ring.
        exchange: one of ``EXCHANGES``.

    Raises:
        ValueError: ``heads`` is wanted, but Ulysses does not divide the heads.
    """
    best, price = cheaper_exchange(sizes, counts)
    if ulysses > 1 and (exchange == "heads" or (exchange == "auto" and not sizes.heads % ulysses)):
        plan = head_plan(sizes.heads, sizes.key_heads, ulysses)
        inner, cost = cheaper_exchange(replace(sizes, heads=sizes.heads // ulysses), ring_counts)
        cost += heads_bytes(sizes, ulysses, sum(map(len, plan.kv_heads))) + 2 * HOP_BYTES
        if exchange == "heads" or cost < price:
            return True, inner
    return False, best if exchange in ("auto", "heads") else exchange
