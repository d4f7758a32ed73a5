# SPDX-License-Identifier: Apache-2.0
"""Heads of models: the loss and the log-probabilities of a decoder in chunks of tokens, and small heads.

The complete logits never exist. If the output layer is only a product, fpdt/chunked_loss.py and fpdt/log_probs.py
compute them. Otherwise (soft-cap, scale, bias, LoRA) the model's own forward runs on chunks of the hidden states;
nothing is read from its configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from megatron.context_parallel.attention.kernels.sums import accumulation_dtype
from megatron.context_parallel.fpdt.chunked_ffn import apply_in_chunks, even_spans
from megatron.context_parallel.fpdt.chunked_loss import chunked_linear_cross_entropy
from megatron.context_parallel.fpdt.log_probs import LOGITS, TokenScores, log_probs
from megatron.context_parallel.huggingface.rank_batch import IGNORED
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Span
from megatron.platform.autograd import once_differentiable

LARGE = 100.0  # a logit that a soft-cap would change visibly


def cross_entropy_sum(model: PreTrainedModel, hidden_BSH: Tensor, targets_BS: Tensor, chunks: int | None) -> Tensor:
    """Sum of the losses of all targets that are not ignored.

    Args:
        hidden_BSH: the output of the model's base.
        targets_BS: int64, -100 for ignored targets.
        chunks: number of spans of tokens; default as in FPDT: twice the vocabulary size divided by the hidden size.

    Returns:
        A scalar in fp32 (fp64).
    """
    hidden, targets, weight = _inputs(model, hidden_BSH, targets_BS)
    chunks = chunks or 2 * ceil(vocabulary(model) / hidden.size(-1))
    if weight is None:
        return -_own_scores(model, hidden, targets, chunks)[:, 0].sum()
    return chunked_linear_cross_entropy(
        hidden[:, None],
        weight,
        targets.clamp(min=0)[:, None],
        targets.ne(IGNORED).to(accumulation_dtype(hidden.dtype))[:, None],
        chunks=chunks,
        vocab_size=weight.size(0),
    )


def token_scores(
    model: PreTrainedModel,
    hidden_BSH: Tensor,
    targets_BS: Tensor,
    chunks: int | None,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    greedy: bool = False,
) -> TokenScores:
    """Scores [b, s] of all targets that are not ignored; see :func:`cross_entropy_sum` and :func:`log_probs`."""
    hidden, targets, weight = _inputs(model, hidden_BSH, targets_BS)
    if weight is None:
        chunks = chunks or ceil(hidden.size(0) * vocabulary(model) / LOGITS)
        scores = _own_scores(model, hidden, targets, chunks, temperature, entropy, greedy)
        scores = scores.unflatten(0, targets_BS.shape)
        return TokenScores(
            scores[..., 0], scores[..., 1] if entropy else None, scores[..., -1].detach() if greedy else None
        )
    scores = log_probs(
        hidden[:, None],
        weight,
        targets.clamp(min=0)[:, None],
        targets.ne(IGNORED)[:, None],
        temperature=temperature,
        entropy=entropy,
        greedy=greedy,
        chunks=chunks,
    )
    return TokenScores(*(None if x is None else x.view(targets_BS.shape) for x in scores))


def _inputs(model: PreTrainedModel, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states and targets of all samples together, and :func:`plain_weight`, without gradients if none are on."""
    if isinstance(_head(model).weight, DTensor):
        raise ValueError("fully_shard was applied to the output layer: apply it to the complete model only")
    hidden, targets, weight = hidden.flatten(0, 1), targets.flatten(), plain_weight(model)
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), None if weight is None else weight.detach()
    return hidden, targets, weight


def logits_of(model: PreTrainedModel, hidden_BSH: Tensor) -> Tensor:
    """The logits that the model's own forward computes from hidden states.

    Raises:
        ValueError: this forward needs more from the model's base than hidden states.
    """
    try:
        return type(model).forward(OnlyHead(model, hidden_BSH), inputs_embeds=hidden_BSH, return_dict=True).logits
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(
            f"the output layer of {type(model).__name__} cannot run separately, which a loss in chunks needs: {error}"
        ) from error


def plain_weight(model: PreTrainedModel) -> Tensor | None:
    """The output layer's weight, if even large logits are just its product with hidden states, else None."""
    head = _head(model)
    if not isinstance(head, nn.Linear) or head.bias is not None or not head.weight.is_floating_point():
        return None
    weight = head.weight
    with torch.no_grad():
        hidden = torch.randn(1, 2, weight.size(1), generator=torch.Generator().manual_seed(1))
        hidden = hidden.to(weight.device, weight.dtype)
        hidden *= LARGE / F.linear(hidden, weight).abs().max()
        # A weight of 0 gives NaN, which is not equal to itself: then the result is None.
        return weight if torch.equal(logits_of(model, hidden), F.linear(hidden, weight)) else None


def vocabulary(model: PreTrainedModel) -> int:
    return _head(model).weight.size(0)


def sum_for_averaged_gradients(axis: Axis, local: Tensor) -> Tensor:
    """The sum of ``local`` over ranks, on each rank. Gradients *averaged* over ranks are those of this sum."""
    return local if axis.size == 1 else _Sum.apply(local, axis)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis) -> Tensor:
        ctx.size = axis.size
        total = local.clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    @once_differentiable("the loss over ranks")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


class OnlyHead:
    """A model whose base returns given hidden states; the model's own forward runs on it.

    Args:
        pooled: the base's ``pooler_output``.
        replaced: other modules.
    """

    def __init__(self, model: PreTrainedModel, hidden: Tensor, pooled: Tensor | None = None, **replaced: Any) -> None:
        self._model = model
        vars(self)[model.base_model_prefix] = _Base(model.base_model, hidden, pooled)
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class _Base:
    """Replaces a base, or the decoder within it, which OPT's forward calls."""

    def __init__(self, base: nn.Module, hidden: Tensor, pooled: Tensor | None) -> None:
        self._base, self._hidden, self._pooled = base, hidden, pooled

    def __call__(self, *_: Any, **__: Any) -> _BaseOutput:
        return _BaseOutput(self._hidden, self._pooled)

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._base, name)
        return _Base(inner, self._hidden, self._pooled) if isinstance(inner, nn.Module) else inner


class _BaseOutput:
    """The output of a base: hidden states and perhaps a pooler's; every other field is None."""

    def __init__(self, hidden: Tensor, pooled: Tensor | None) -> None:
        self.last_hidden_state, self.pooler_output = hidden, pooled

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state, *(() if self.pooler_output is None else (self.pooler_output,)))[index]


def _head(model: PreTrainedModel) -> nn.Module:
    return model.get_output_embeddings()


def _own_scores(
    model: PreTrainedModel,
    hidden_TH: Tensor,
    targets: Tensor,
    chunks: int,
    temperature: float = 1.0,
    entropy: bool = False,
    greedy: bool = False,
) -> Tensor:
    """[t, 1 to 3]: log-probabilities and, if wanted, entropies and greedy choices; 0 for ignored targets."""
    wide, wanted = accumulation_dtype(hidden_TH.dtype), targets.ne(IGNORED).nonzero().squeeze(1)
    chosen = targets[wanted]

    def scores(part: Tensor, rows: Span) -> Tensor:
        logits = logits_of(model, part[None])[0].to(wide)
        every = (logits if temperature == 1 else logits / temperature).log_softmax(-1)
        result = [every.gather(1, chosen[slice(*rows), None])]
        if entropy:
            result.append(-(every.exp() * every).sum(-1, keepdim=True))
        if greedy:
            result.append((every.argmax(-1, keepdim=True) == chosen[slice(*rows), None]).to(wide))
        return torch.cat(result, dim=1)

    base = {id(parameter) for parameter in model.base_model.parameters()}
    own = [*_head(model).parameters(), *(x for x in model.parameters() if id(x) not in base)]
    own = list({id(parameter): parameter for parameter in own}.values())
    shape = (len(wanted), 1 + entropy + greedy)
    spans = even_spans(len(wanted), ceil(chunks * len(wanted) / max(len(targets), 1)))
    found = apply_in_chunks(scores, hidden_TH[wanted], own, spans, shape=shape, dtype=wide)
    return found.new_zeros((len(targets), shape[1])).index_copy(0, wanted, found)


# Models that are no causal decoder with logits: encoders, classifiers, rewards, embeddings.
#
# A head (a classifier, a pooler) is small, but it may read any token: the first, the last that is not padding, a mean.
# So it runs on every rank, on the hidden states of the complete sequence. A head that is one product of each token runs
# before the tokens are gathered.

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
