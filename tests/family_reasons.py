# SPDX-License-Identifier: Apache-2.0
"""Whether a refusal of a family says what is so, by transformers alone on one process.

Which masks a model makes, what it hands to attention, which outputs move when one token changes: an attention function
that computes as transformers does records it.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

RECORDER = "records_what_attention_is_asked"
TOKENS = torch.arange(3, 27)[None]
PLACE = 8  # of the token that is changed


def is_true(why: str, model: PreTrainedModel) -> bool | None:
    """Whether a refusal's reason holds; None: nothing here can tell."""
    return next((check(model, match) for pattern, check in CHECKS if (match := re.search(pattern, why))), None)


@dataclass
class Seen:
    """What a model asks of attention.

    Attributes:
        masks: [q, k] of each call, True where a query sees a key; None: none was given.
        altered: a mask that attention got is not one that transformers made.
        ruled: a mask was made by a rule beside the causal one.
    """

    masks: list[Tensor | None] = field(default_factory=list)
    altered: bool = False
    ruled: bool = False


def observe(model: PreTrainedModel, tokens: Tensor, alone: bool = False, **given: Any) -> tuple[Tensor, Seen]:
    """Logits of transformers' own forward, and what it asked; ``alone``: in attention each token sees itself alone."""
    seen, made = Seen(), []

    def mask_of(*args: Any, **kwargs: Any) -> Tensor:
        seen.ruled |= kwargs.get("use_vmap", False) or not kwargs.get("allow_is_causal_skip", True)
        made.append(eager_mask(*args, **kwargs))
        return made[-1]

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **others: Any) -> Any:
        mask = attention_mask
        seen.masks.append(None if mask is None else mask[0, 0] > -1)
        seen.altered |= not any(mask is x for x in made)
        if alone:
            mask = torch.full((q.size(2), k.size(2)), -math.inf).fill_diagonal_(0)[None, None]
        return sdpa_attention_forward(module, q, k, v, mask, scaling=others.get("scaling"), is_causal=False)

    AttentionInterface.register(RECORDER, attend)
    AttentionMaskInterface.register(RECORDER, mask_of)
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDER)
    try:
        with torch.no_grad():
            return model(input_ids=tokens, **given).logits, seen
    finally:
        model.set_attn_implementation(before)


def moved(before: Tensor, after: Tensor) -> Tensor:
    """[s]: whose logits [1, s, vocabulary] differ by more than rounding."""
    return (before - after).abs().amax(dim=(0, 2)) > 1e-4 * before.abs().max()


def changed(tokens: Tensor) -> Tensor:
    return tokens.index_fill(1, torch.tensor(PLACE), 50)


def tokens_mix(model: PreTrainedModel, _: re.Match) -> bool:
    """A token moves the outputs of others though in attention each sees itself alone."""
    others = moved(*(observe(model, tokens, alone=True)[0] for tokens in (TOKENS, changed(TOKENS))))
    return bool(others.index_fill(0, torch.tensor(PLACE), False).any())


def mask_is_neither(model: PreTrainedModel, _: re.Match) -> bool:
    """An attention uses a mask that is neither causal nor a causal window, or none."""
    far = torch.arange(TOKENS.size(1))[:, None] - torch.arange(TOKENS.size(1))
    windows = [(far >= 0) & (far < width) for width in range(1, TOKENS.size(1) + 1)]
    masks = observe(model, TOKENS)[1].masks
    return any(mask is None or not any(torch.equal(mask, window) for window in windows) for mask in masks)


def mask_is_altered(model: PreTrainedModel, _: re.Match) -> bool:
    """What reaches attention is not the mask that transformers' functions made, or nothing reaches it."""
    seen = observe(model, TOKENS)[1]
    return seen.altered or not seen.masks


def mask_is_ruled(model: PreTrainedModel, _: re.Match) -> bool:
    return observe(model, TOKENS)[1].ruled


def selects_keys(model: PreTrainedModel, _: re.Match) -> bool:
    """Outputs move where its indexers select all keys."""
    with torch.no_grad():
        before = model(TOKENS).logits
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 2 * TOKENS.size(1)
        return bool(moved(before, model(TOKENS).logits).any())


def own_attention(model: PreTrainedModel, match: re.Match) -> bool:
    """The module that it names does not call what AttentionInterface gives."""
    named = next(type(module) for module in model.modules() if type(module).__name__ == match[1])
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" not in inspect.getsource(sys.modules[named.__module__])


def goes_by_place(model: PreTrainedModel, _: re.Match) -> bool:
    """Two tokens that change places and keep their positions get other outputs, though each sees itself alone."""
    order = torch.arange(TOKENS.size(1))
    order[[PLACE, -1]] = order[[-1, PLACE]]
    positions = torch.arange(TOKENS.size(1))[None]
    usual = observe(model, TOKENS, alone=True, position_ids=positions)[0]
    swapped = observe(model, TOKENS[:, order], alone=True, position_ids=positions[:, order])[0]
    return bool(moved(usual, swapped[:, order]).any())


def counts_otherwise(model: PreTrainedModel, _: re.Match) -> bool:
    """0, 1, 2, ... as position_ids and none give other outputs."""
    positions = torch.arange(TOKENS.size(1))[None]
    with torch.no_grad():
        return bool(moved(*(model(TOKENS, **given).logits for given in ({}, {"position_ids": positions}))).any())


def takes_none(model: PreTrainedModel, match: re.Match) -> bool:
    """transformers refuses it too."""
    try:
        model(input_ids=TOKENS, **{match[1]: torch.arange(TOKENS.size(1))[None]})
    except TypeError as error:
        return match[1] in str(error)
    return False


def sees_later(model: PreTrainedModel, _: re.Match) -> bool:
    """A token moves the outputs of those before it."""
    with torch.no_grad():
        return bool(moved(*(model(tokens).logits for tokens in (TOKENS, changed(TOKENS))))[:PLACE].any())


def other_loss(model: PreTrainedModel, _: re.Match) -> bool:
    """Its own loss is not the cross entropy of its own logits for the next token."""
    with torch.no_grad():
        found = model(input_ids=TOKENS, labels=TOKENS)
    expected = F.cross_entropy(found.logits[0, :-1], TOKENS[0, 1:])
    return bool((found.loss - expected).abs() > 1e-4 * expected)


def no_base(model: PreTrainedModel, match: re.Match) -> bool:
    return not hasattr(model, match[1])


def no_head(model: PreTrainedModel, _: re.Match) -> bool:
    return model.get_output_embeddings() is None


def any_of(*checks: Callable[[PreTrainedModel, re.Match], bool]) -> Callable[[PreTrainedModel, re.Match], bool]:
    return lambda model, match: any(check(model, match) for check in checks)


CHECKS: list[tuple[str, Callable[[PreTrainedModel, re.Match], bool]]] = [
    (r"^(\w+) does not compute attention through", own_attention),
    (r"uses the entries of its attention mask", mask_is_altered),
    (r"neither causal nor a causal sliding window", mask_is_neither),
    (r"has no causal mask made by transformers", any_of(mask_is_altered, mask_is_neither)),
    (r"see each other outside of its attention", tokens_mix),
    (r"adds to its causal mask", mask_is_ruled),
    (r"layers of the kind indexed_attention", selects_keys),
    (r"layers of the kind", any_of(tokens_mix, mask_is_neither)),
    (r"uses a token's index", goes_by_place),
    (r"does not count positions", counts_otherwise),
    (r"has no argument (\w+):", takes_none),
    (r"asks for attention that is not causal", sees_later),
    (r"computes another loss", other_loss),
    (r"has an encoder", lambda model, _: model.config.is_encoder_decoder),
    (r"has no base model (\w+)", no_base),
    (r"is not a causal language model", no_head),
]
