# SPDX-License-Identifier: Apache-2.0
"""A test of a model on a few tokens that see only themselves: whether anything but attention mixes tokens, and whether
positions come from position_ids."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from megatron.context_parallel.huggingface.decoder_loss import labels_of
from megatron.context_parallel.huggingface.indexed_layers import Question, chooses_keys
from megatron.context_parallel.huggingface.linear_layers import MIXER, Alone, has_state
from megatron.context_parallel.huggingface.transformers_attention import Call, NotCausal, masks_by

LENGTH, MOVED = 8, 3


@dataclass(frozen=True)
class _Alone:
    """Attention in which each token sees only itself."""

    window: int | None
    ahead: bool
    heads: set[tuple[int, int]]
    lessons: None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        self.heads.add((q.size(1), k.size(1)))
        return v.repeat_interleave(q.size(1) // v.size(1), dim=1).transpose(1, 2).contiguous()

    def attend_blocks(self, q: Tensor, k: Tensor, v: Tensor, call: Call, asked: Question) -> Tensor:
        self.heads.add((q.size(1) // asked.q.size(2), k.size(1) // asked.q.size(2)))  # each group is cut by itself
        return _Alone(self.window, self.ahead, set()).attend(q, k, v, call)

    def choose(self, q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
        return torch.arange(q.size(1), device=q.device)[None, :, None].expand(q.size(0), -1, 1)

    def attend_chosen(self, q: Tensor, kv: Tensor, chosen: Tensor, value_size: int, *_: Any) -> Tensor:
        return kv[:, :, None, -value_size:].expand(-1, -1, q.size(2), -1)


@dataclass(frozen=True)
class ProbeResult:
    """The results of a model on a few tokens.

    Attributes:
        logits: [3, 8, vocabulary].
        loss: computed by the model.
        expected: cross-entropy of the next token, from these logits.
        heads: (query heads, key heads) of its attention layers.
        ahead: whether each of its masks lets queries see later keys.
    """

    logits: Tensor
    loss: Tensor
    expected: Tensor
    heads: set[tuple[int, int]]
    ahead: set[bool]


def run_alone(
    model: PreTrainedModel, then: Callable[[], None] = lambda: None, with_positions: bool = True
) -> ProbeResult:
    """Run a model on a few tokens that see only themselves.

    The first two samples end with the same token at the same position. The third is the first
    with its last token and its token at :data:`MOVED` exchanged, each together with its position id.

    The model itself is called, because fully_shard has hooks on it.

    Args:
        then: called afterwards, with dropout and gradients still off.
        with_positions: give the model ``position_ids``; without them the third sample has no meaning.
    """
    heads: set[tuple[int, int]] = set()
    ahead: set[bool] = set()

    def alone(window: int | None, looks_ahead: bool) -> _Alone:
        ahead.add(looks_ahead)
        return _Alone(window, looks_ahead, heads)

    embedding, config = model.get_input_embeddings(), model.config.get_text_config(decoder=True)
    device, size = embedding.weight.device, config.vocab_size
    tokens = torch.arange(2 * LENGTH, device=device).view(2, -1) % size
    # Not the padding token: its embedding is often 0, and so are its logits.
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
    } | ({"position_ids": positions} if with_positions else {})
    _refuse_unknown(model if labels_of(model) in ("next", "own") else model.base_model, given)
    hook = None
    if any(map(has_state, model.modules())):
        hook = model.base_model.register_forward_pre_hook(_add_alone, with_kwargs=True)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), masks_by(alone):
            output = _call(model, given)
            then()
    finally:
        if hook is not None:
            hook.remove()
        for module in training:
            module.training = True
    if output.loss is None:
        raise ValueError(f"{type(model).__name__} computes no loss from labels: not supported over ranks")
    logits, targets = output.logits, tokens % output.logits.size(-1)
    if labels_of(model) != "own":
        logits, targets = logits[:, :-1], targets[:, 1:]
    expected = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    return ProbeResult(output.logits, output.loss, expected, heads, ahead)


def _add_alone(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, MIXER: Alone()}


def _call(model: PreTrainedModel, given: dict[str, Any]) -> Any:
    """The model's outputs. An error of the model becomes a ValueError of one line."""
    who = type(model).__name__
    try:
        if labels_of(model) in ("head", "base"):  # whose hidden states are looked at
            labels = given.pop("labels")
            hidden = model.base_model(**given).last_hidden_state
            loss = F.cross_entropy(hidden[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten() % hidden.size(-1))
            return CausalLMOutputWithPast(loss=loss, logits=hidden)
        return model(**given)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        if any(kind.__name__ in str(error) for kind in (_Alone, NotCausal)):
            raise ValueError(
                f"{who} uses the entries of its attention mask, which do not exist over ranks: not supported"
            ) from error
        raise ValueError(f"{who} fails with the arguments used over ranks: {type(error).__name__}: {error}") from error


def _refuse_unknown(model: PreTrainedModel, given: dict[str, Any]) -> None:
    """Refuse a model whose forward lacks an argument that it will be called with."""
    known = inspect.signature(type(model).forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in given:
        if name not in known and name != "labels":
            raise ValueError(f"{type(model).__name__} has no argument {name}: not supported over ranks")


def refuse_mixing(model: PreTrainedModel, chunks: bool = False) -> set[tuple[int, int]]:
    """Refuse a model that mixes tokens outside of the attention function: convolutions, recurrences, other attention.

    If tokens see only themselves, the result for a token must not depend on earlier tokens or on its index in the
    input. The model's loss must be the loss that is computed over ranks.

    Args:
        chunks: layers run in chunks, whose queries see no later chunk.

    Returns:
        (query heads, key heads) of its attention layers.
    """
    who = type(model).__name__
    probe = run_alone(model)
    first, second, moved = probe.logits[0, -1], probe.logits[1, -1], probe.logits[2, MOVED]
    close = partial(_close, limit=1e-4 if model.dtype in (torch.float32, torch.float64) else 3e-2)
    mixes = any(has_state(module) or chooses_keys(module) for module in model.modules())
    if not (probe.heads or mixes) or not close(first, second):
        raise ValueError(
            f"tokens of {who} see each other outside of its attention (a convolution, a recurrence, attention of its "
            "own): not supported over ranks"
        )
    if not close(first, moved):
        raise ValueError(f"{who} uses a token's index in its input in place of position_ids: not supported over ranks")
    if not close(probe.logits[:2], run_alone(model, with_positions=False).logits[:2]):
        raise ValueError(f"{who} does not count positions as 0, 1, 2, ... by default: not supported over ranks")
    if chunks and True in probe.ahead:
        raise ValueError(f"{who} lets tokens see later ones, which FPDT's chunks do not: leave fpdt out")
    if not close(probe.expected, probe.loss):
        which = "masked" if labels_of(model) == "own" else "next"
        raise ValueError(
            f"{who} computes another loss ({float(probe.loss):.4g}) than the cross entropy of the {which} token "
            f"({float(probe.expected):.4g}), which is the only one supported over ranks"
        )
    return probe.heads


def _close(x: Tensor, y: Tensor, limit: float) -> bool:
    """Whether x and y are equal up to rounding; False for NaN."""
    return bool((x.double() - y.double()).abs().max() < limit * x.double().abs().max())
