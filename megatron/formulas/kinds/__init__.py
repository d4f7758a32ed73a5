# SPDX-License-Identifier: Apache-2.0
"""Closed forms of the kinds of layers: what mixes tokens in a layer, and experts.

A kind of mixer is a class in a file here, with the functions of :class:`Attention`; its simulated work is the module of
simulator/cost/kinds/ that it names. A :class:`Shape` holds the mixers of its layers.
"""

from __future__ import annotations

from megatron.formulas.kinds.attention_figures import ATTENTION, Attention
from megatron.formulas.strategy import Shape


def attention_of(shape: Shape) -> Attention:
    """The kind of the layers of a model that attend to keys."""
    return shape.latent or ATTENTION


def mixer_of(shape: Shape) -> Attention:
    """What mixes tokens in a model with one kind of layers."""
    return shape.linear or attention_of(shape)
