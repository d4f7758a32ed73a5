# SPDX-License-Identifier: Apache-2.0
"""A model on a few tokens of which each sees itself alone: that only attention mixes them, and what tells positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from megatron.context_parallel.huggingface.transformers_attention import Call, NotCausal, masks_by

LENGTH, MOVED = 8, 3


@dataclass(frozen=True)
class _Alone:
    """Attention in which each token sees itself alone."""

    window: int | None
    heads: set[tuple[int, int]]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        self.heads.add((q.size(1), k.size(1)))
        return v.repeat_interleave(q.size(1) // v.size(1), dim=1).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Ran:
    """What a model made of a few tokens.

    Attributes:
        logits: [3, 8, vocabulary].
        loss: the model's own.
        expected: cross entropy of the next token, by those logits.
        heads: how many of queries and of keys its attention layers have.
    """

    logits: Tensor
    loss: Tensor
    expected: Tensor
    heads: set[tuple[int, int]]


def run_alone(model: PreTrainedModel, then: Callable[[], None] = lambda: None, told_positions: bool = True) -> Ran:
    """A few tokens through a model.

    The first two samples end with the same token at the same position. The third is the first with its last token and
    the one at :data:`MOVED` in each other's place, each with the position that it had.

    The whole model is called, which is what fully_shard has hooks on.

    Args:
        then: called after it, with dropout and gradients still off.
        told_positions: give the model ``position_ids``; without them, the third sample means nothing.
    """
    heads: set[tuple[int, int]] = set()
    embedding, config = model.get_input_embeddings(), model.config.get_text_config(decoder=True)
    device, size = embedding.weight.device, config.vocab_size
    tokens = torch.arange(2 * LENGTH, device=device).view(2, -1) % size
    # Not the token that pads: its embedding is often 0, and so are all logits behind it.
    tokens[:, -1] = min({0, 1, 2} - {config.pad_token_id, getattr(embedding, "padding_idx", None)})
    positions = torch.arange(LENGTH, device=device)
    places = positions.clone()
    places[[MOVED, -1]] = places[[-1, MOVED]]
    tokens, positions = torch.cat((tokens, tokens[:1, places])), torch.stack((positions, positions, places))
    given = {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": torch.ones_like(tokens),
        "use_cache": False,
        "return_dict": True,
    } | ({"position_ids": positions} if told_positions else {})
    _refuse_unknown(model, given)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), masks_by(lambda window: _Alone(window, heads)):
            found = _call(model, given)
            then()
    finally:
        for module in training:
            module.training = True
    if found.loss is None:
        raise ValueError(f"{type(model).__name__} computes no loss from labels: not supported over ranks")
    expected = F.cross_entropy(found.logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    return Ran(found.logits, found.loss, expected, heads)


def _call(model: PreTrainedModel, given: dict[str, Any]) -> Any:
    """The model's outputs, or in one line why what it was given did not do."""
    who = type(model).__name__
    try:
        return model(**given)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        if any(kind.__name__ in str(error) for kind in (_Alone, NotCausal)):
            raise ValueError(
                f"{who} computes with its attention mask on its own, and over ranks there is none: not supported"
            ) from error
        raise ValueError(f"{who} cannot be called as over ranks: {type(error).__name__}: {error}") from error


def _refuse_unknown(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """Refuse a model whose forward has no place for what it will be called with."""
    known = inspect.signature(type(model).forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known:
            raise ValueError(f"{type(model).__name__} takes no {name}, which a part of a sequence cannot do without")


def refuse_mixing(model: PreTrainedModel) -> set[tuple[int, int]]:
    """Refuse a model in which tokens mix anywhere but in attention: convolutions, recurrences, attention of its own.

    With tokens that see only themselves, what comes of one must not depend on those before it, nor on its place among
    those that a rank holds. The loss must be the one that is computed over ranks.

    Returns:
        How many heads of queries and of keys its layers have.
    """
    who = type(model).__name__
    ran = run_alone(model)
    first, second, moved = ran.logits[0, -1], ran.logits[1, -1], ran.logits[2, MOVED]
    alike = partial(_alike, limit=1e-4 if model.dtype in (torch.float32, torch.float64) else 3e-2)
    if not ran.heads or not alike(first, second):
        raise ValueError(
            f"tokens of {who} see each other outside of its attention (a convolution, a recurrence, attention of its "
            "own), which cannot be spread over ranks"
        )
    if not alike(first, moved):
        raise ValueError(
            f"{who} goes by a token's place in its input and not by position_ids, and a rank holds tokens of other "
            "places: not supported over ranks"
        )
    if not alike(ran.logits[:2], run_alone(model, told_positions=False).logits[:2]):
        raise ValueError(
            f"{who} counts positions otherwise than 0, 1, 2, ... where it is given no position_ids: not supported "
            "over ranks"
        )
    if not alike(ran.expected, ran.loss):
        raise ValueError(
            f"{who} computes a loss of its own, {float(ran.loss):.4g} where the cross entropy of the next token is "
            f"{float(ran.expected):.4g}: over ranks only that is"
        )
    return ran.heads


def _alike(x: Tensor, y: Tensor, limit: float) -> bool:
    """Up to rounding. NaN is like nothing."""
    return bool((x.double() - y.double()).abs().max() < limit * x.double().abs().max())
