# SPDX-License-Identifier: Apache-2.0
"""Closed forms as the papers publish them. Tests compare them with the formulas of the other modules.

GB is 10^9 bytes. Where a paper's table does not follow from its formula, both are given.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9

# --- memory: a web page with formulas, sections 15.1 to 15.4 ---

# Section 15.1.1: billions of parameters, GB of model states.
MODEL_STATES = ((0.5, 8), (3, 48), (7, 112), (70, 1120))


def model_states(parameters: float, ranks: int = 1, zero: int = 0, k: float = 12) -> float:
    """Bytes of fp16 parameters (2), fp16 gradients (2) and optimizer states (``k``) that a rank of ``ranks`` holds.

    Section 15.4.2 gives only ZeRO 1; 2 and 3 divide gradients and parameters too (arXiv 1910.02054). This program keeps
    fp32 gradients and needs 18 bytes per parameter, not 16.
    """
    return parameters * (2 / (ranks if zero > 2 else 1) + 2 / (ranks if zero > 1 else 1) + k / (ranks if zero else 1))


def ffn_activations(b: int, s: int, d: int, p: int = 2) -> float:
    """Section 15.1.2: the total, ``9 bsdp + bsd``, counts the second layer's output once, but its row says 4."""
    return 9 * b * s * d * p + b * s * d


def attention_activations(b: int, s: int, d: int, heads: int, p: int = 2) -> float:
    """Section 15.1.2: ``5 bsdp + 2 bs^2Hp + bsd + bs^2H``; attention without a flash kernel keeps all scores."""
    return 5 * b * s * d * p + 2 * b * s * s * heads * p + b * s * d + b * s * s * heads


def activations(layers: int, b: int, s: int, d: int, heads: int, p: int = 2) -> float:
    """Section 15.1.2: FFN, attention and ``2 bsdp`` for norms: ``L (16 bsdp + 2 bsd + 2 bs^2Hp + bs^2H)``."""
    one = ffn_activations(b, s, d, p) + attention_activations(b, s, d, heads, p) + 2 * b * s * d * p
    return layers * one


@dataclass(frozen=True)
class Qwen2Row:
    """A row of the page's table for Qwen2: sizes, and two terms in GB, linear and quadratic in the length."""

    name: str
    layers: int
    hidden: int
    length: int
    heads: int
    linear: float
    square: float

    @property
    def formula(self) -> tuple[float, float]:
        """The two terms in GB by the page's formula with p = 2 and without its ``2 bsd``: L (32 bsd, 5 bs^2H)."""
        tokens = self.length * self.hidden
        return 32 * self.layers * tokens / GB, 5 * self.layers * self.length**2 * self.heads / GB

    @property
    def as_printed(self) -> tuple[float, float]:
        """Formulas that reproduce the printed numbers: 33 L bsd (for 7B it gives 13.6 instead), and 8 bs^2H of *one*
        layer in GiB, rounded up."""
        return (
            33 * self.layers * self.length * self.hidden / GB,
            8 * self.length**2 * self.heads / 2**30,
        )


QWEN2 = (
    Qwen2Row("Qwen2 0.5B", 24, 896, 4096, 14, 2.9, 2),
    Qwen2Row("Qwen2 7B", 28, 3584, 4096, 28, 3.9, 4),
    Qwen2Row("Qwen2 72B", 64, 8192, 4096, 64, 71, 8),
)

# --- FPDT (2408.16978), table 2: what a block holds at each step, in hidden states of N tokens (Nd). Only four entries
# of the backward row are legible; attention's is also in the text (q, k, v, out, dout, dq, dk, dv).
FPDT_STEPS = ("hidden", "qkv projection", "all-to-all", "attention", "ffn", "other")
FPDT_FORWARD: tuple[int | None, ...] = (1, 3, 4, 4, 4, 3)
FPDT_BACKWARD: tuple[int | None, ...] = (2, 6, 8, 8, None, None)


def fpdt_attention(chunks: int = 1, *, heads: int = 1, kv_heads: int = 1) -> tuple[float, float]:
    """(forward, backward) of attention in Nd with the sequence in ``chunks``.

    Forward holds q, k, v and out, backward these and their gradients. Keys and values have ``kv_heads``.
    """
    one = (2 + 2 * kv_heads / heads) / chunks
    return one, 2 * one


# --- USP (arXiv 2405.07719), table 2, from the text of its section 4, because the table is an image. ---


@dataclass(frozen=True)
class UspRow:
    """One block, with hidden size h and bs*L tokens, under a method over N ranks.

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
    """Section 4. ``group``: query heads per key/value head (GQA), which divides the bytes of keys and values.

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
    """The same for Megatron's sequence parallelism: two all-gathers and two reduce-scatters of Nh, for any P."""
    return 4 * length * hidden
