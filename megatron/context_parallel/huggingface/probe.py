# SPDX-License-Identifier: Apache-2.0
"""A model on a few tokens of which each sees itself alone: what shows that only its attention mixes tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatron.context_parallel.huggingface.attention import Call, masks_by

LENGTH = 8


@dataclass(frozen=True)
class _Alone:
    """Attention in which each token sees itself alone."""

    window: int | None
    calls: list[Call]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        self.calls.append(call)
        return v.repeat_interleave(q.size(1) // v.size(1), dim=1).transpose(1, 2)


def run_alone(model: PreTrainedModel, then: Callable[[], None] = lambda: None) -> tuple[Tensor, list[Call]]:
    """Logits [2, 8, vocabulary] of two samples that end with the same token, and what its attention layers asked for.

    The whole model is called, which is what fully_shard has hooks on.

    Args:
        then: called after it, with dropout and gradients still off.
    """
    calls: list[Call] = []
    device = model.get_input_embeddings().weight.device
    tokens = torch.arange(2 * LENGTH, device=device).view(2, -1) % model.config.vocab_size
    embedding = model.get_input_embeddings()
    # Not the token that pads: its embedding is often 0, and so are all logits behind it.
    tokens[:, -1] = min({0, 1, 2} - {model.config.pad_token_id, getattr(embedding, "padding_idx", None)})
    positions = torch.arange(LENGTH, device=device).expand(2, -1)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), masks_by(lambda window: _Alone(window, calls)):
            found = model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                position_ids=positions,
                use_cache=False,
                return_dict=True,
            )
            then()
    finally:
        for module in training:
            module.training = True
    return found.logits, calls


def refuse_mixing(model: PreTrainedModel) -> None:
    """Refuse a model in which tokens mix anywhere but in attention: convolutions, recurrences, attention of its own.

    With tokens that see only themselves, what comes of one must not depend on those before it.
    """
    logits, calls = run_alone(model)
    first, second = logits[:, -1].double()
    wide = model.dtype in (torch.float32, torch.float64)
    if not calls or not (first - second).abs().max() < (1e-4 if wide else 3e-2) * first.abs().max():
        raise ValueError(
            f"tokens of {type(model).__name__} see each other outside of its attention (a convolution, a recurrence, "
            "attention of its own), which cannot be spread over ranks"
        )
