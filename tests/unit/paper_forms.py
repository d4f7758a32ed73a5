# SPDX-License-Identifier: Apache-2.0
"""Closed forms as the papers of FPDT, USP and DeepSpeed-Ulysses publish them."""

from __future__ import annotations

from dataclasses import dataclass

# --- FPDT (2408.16978), table 2: what a block holds at each step, in hidden states of N tokens (Nd). Only four entries
# of the backward row are legible; attention's is also in the text (q, k, v, out, dout, dq, dk, dv).
FPDT_STEPS = ("hidden", "qkv projection", "all-to-all", "attention", "ffn", "other")
FPDT_FORWARD: tuple[int | None, ...] = (1, 3, 4, 4, 4, 3)
FPDT_BACKWARD: tuple[int | None, ...] = (2, 6, 8, 8, None, None)


def fpdt_attention(chunks: int = 1, *, heads: int = 1, kv_heads: int = 1) -> tuple[float, float]:
    """Memory of attention (forward, backward), in units of Nd, with the sequence in ``chunks`` chunks.

    Forward holds q, k, v and out; backward holds these and their gradients. Keys and values have ``kv_heads``.
    """
    one = (2 + 2 * kv_heads / heads) / chunks
    return one, 2 * one


# --- USP (arXiv 2405.07719), table 2, from the text of its section 4, because the table is an image. ---


@dataclass(frozen=True)
class UspRow:
    """The costs of a method over N ranks, for one block with hidden size h and bs*L tokens.

    Attributes:
        parameters: elements sent for parameters and their gradients, in units of the block's 12 h^2: 2 for all-reduce,
            1 for all-gather and reduce-scatter.
        activations: elements sent for activations, forward and backward, in units of bs L h.
        states: shares of (parameters, gradients, optimizer states) that a rank holds.
        kept: share of the activations that a rank holds; None: between 1/N and 1.
    """

    method: str
    parameters: float
    activations: float
    states: tuple[float, float, float]
    kept: float | None


def usp_table_2(ranks: int, group: float = 1) -> list[UspRow]:
    """The rows of the table. ``group``: query heads per key/value head (GQA); it divides the bytes of keys and values.

    Ulysses has 4 all-to-alls per pass, in which a rank sends 1/N each; Ring sends k, v and their gradients for any N.
    """
    n, share = ranks, 1 / ranks
    ulysses = 4 / n + 4 / n / group
    return [
        UspRow("SP-Ulysses", 2, ulysses, (1, 1, 1), share),
        UspRow("SP-Ring", 2, 4 / group, (1, 1, 1), share),
        UspRow("DP", 2, 0, (1, 1, 1), share),
        UspRow("ZeRO-1", 2, 0, (1, 1, share), share),
        UspRow("SP-Ulysses + ZeRO-1", 2, ulysses, (1, 1, share), share),
        UspRow("SP-Ulysses + ZeRO-2", 2, ulysses, (1, share, share), share),
        UspRow("SP-Ulysses + ZeRO-3", 3, ulysses, (share, share, share), share),
        UspRow("TP", 0, 8, (share, share, share), None),  # four all-reduces
        UspRow("TP-sp", 0, 10, (share, share, share), share),  # six all-gathers and four reduce-scatters
    ]


# --- Ulysses (arXiv 2309.14509), section 3.2 ---


def ulysses_per_link(length: int, hidden: int, ranks: int) -> float:
    """Elements per link in a layer's forward pass: two all-to-alls of 3Nh and Nh, of which a link carries 1/P."""
    return 4 * length * hidden / ranks


def megatron_sp_per_link(length: int, hidden: int) -> float:
    """Elements per link with Megatron's sequence parallelism: 2 all-gathers, 2 reduce-scatters of Nh, for any P."""
    return 4 * length * hidden
