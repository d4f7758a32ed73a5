# SPDX-License-Identifier: Apache-2.0
"""A web page's formulas for memory, sections 15.1 to 15.4, as tools/memory.py --papers prints them.

GB is 10^9 bytes. Where the page's table does not follow from its formula, both are given.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1e9


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
        return (33 * self.layers * self.length * self.hidden / GB, 8 * self.length**2 * self.heads / 2**30)


QWEN2 = (
    Qwen2Row("Qwen2 0.5B", 24, 896, 4096, 14, 2.9, 2),
    Qwen2Row("Qwen2 7B", 28, 3584, 4096, 28, 3.9, 4),
    Qwen2Row("Qwen2 72B", 64, 8192, 4096, 64, 71, 8),
)
