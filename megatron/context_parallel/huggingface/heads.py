# SPDX-License-Identifier: Apache-2.0
"""Models that are no causal decoder with logits: encoders, classifiers, rewards, embeddings.

A head (a classifier, a pooler) is small, but it may read any token: the first, the last that is not padding, a mean. So
it runs on every rank, on the hidden states of the complete sequence. A head that is one product of each token runs
before the tokens are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from megatron.context_parallel.huggingface.decoder_loss import OnlyHead
from megatron.context_parallel.layout.sequence_layout import SequenceLayout

_names = MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()
MASKED = {name for one in _names for name in ((one,) if isinstance(one, str) else one)}


def labels_of(model: PreTrainedModel) -> str:
    """What the outputs of a model's tokens are compared with; see :func:`rank_batch.cut`.

    "base" is a model without any head, which has no labels.
    """
    if model.get_output_embeddings() is None:
        return "base" if model.base_model is model else "head"
    return "own" if type(model).__name__ in MASKED else "next"


def scores_tokens(model: nn.Module) -> bool:
    """Whether the head is one product of each token, as in reward models and classifiers made from decoders."""
    return model.get_output_embeddings() is None and isinstance(getattr(model, "score", None), nn.Linear)


def pooler_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of a base that reads the first token's hidden state, as in BERT."""
    return getattr(model.base_model, "pooler", None)


def through_head(model: PreTrainedModel, base: Any, layout: SequenceLayout, whole: Mapping[str, Any]) -> Any:
    """The outputs of the model's own head for the complete batch, on every rank.

    Args:
        base: the base's outputs for this rank's tokens.
        whole: the complete batch.

    Raises:
        ValueError: the head needs more than hidden states and the pooler's output.
    """
    hidden: Tensor = base.last_hidden_state
    if scores_tokens(model):
        scores = layout.gather(model.score(hidden), 1)
        head = OnlyHead(model, hidden, score=lambda _: scores)
    else:
        head = OnlyHead(model, layout.gather(hidden, 1), getattr(base, "pooler_output", None))
    try:
        return type(model).forward(head, **whole, return_dict=True)
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"the head of {type(model).__name__} is not supported over ranks: {error}") from error
