# SPDX-License-Identifier: Apache-2.0
"""Distribute a model of transformers over the grid, and restore it.

This changes the attention's name and ``use_cache`` in the model's configuration, and ``forward`` of the model and,
with FPDT, of its layers. Weights, their names, hooks and classes stay, so that gradient checkpointing, DDP, fully_shard
and LoRA work as before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, SequenceClassifierOutputWithPast

from megatron.context_parallel.attention.ulysses import head_plan
from megatron.context_parallel.fpdt.log_probs import TokenScores
from megatron.context_parallel.huggingface.decoder_loss import (
    cross_entropy_sum,
    labels_of,
    pooler_of,
    scores_tokens,
    sum_for_averaged_gradients,
    through_head,
    token_scores,
)
from megatron.context_parallel.huggingface.fpdt_layers import Fpdt, chunked_layers
from megatron.context_parallel.huggingface.indexed_layers import (
    asks_for_blocks,
    chooses_keys,
    forward_by_choice,
    forward_with_question,
    hands_on_choice,
)
from megatron.context_parallel.huggingface.linear_layers import (
    MIXER,
    OverRanks,
    forward_with_ours,
    has_state,
    layers_with_state,
)
from megatron.context_parallel.huggingface.packed_rows import PackedRows
from megatron.context_parallel.huggingface.probe import refuse_mixing
from megatron.context_parallel.huggingface.rank_batch import IGNORED, Part, cut, only_within_documents
from megatron.context_parallel.huggingface.transformers_attention import NAME, Shared, masks_by, register
from megatron.context_parallel.layout.grid import Grid
from megatron.context_parallel.layout.sequence_layout import Balance, SequenceLayout

# RoPE whose frequencies depend on the length of the sequence (dynamic NTK, LongRoPE).
#
# transformers uses the largest given position as the length. A rank has only its own positions. Therefore the largest
# position of the complete batch is appended to them, and its result is removed.


def by_length(module: nn.Module) -> bool:
    """Whether a module is a RoPE that depends on the length."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def pass_length(module: nn.Module, longest: Callable[[], int]) -> list[RemovableHandle]:
    """Hooks that make a RoPE's (x, position_ids [b, s]) -> (cos, sin) [b, s, d] use the length ``longest()``."""

    def append_longest(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = torch.full_like(positions[:, :1], longest() - 1)
        positions = torch.cat((positions, last), dim=1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": positions}
        return (args[0], positions, *args[2:]), kwargs

    def remove_longest(_: nn.Module, args: tuple[Any, ...], cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(x[:, :-1] for x in cos_sin)

    before = module.register_forward_pre_hook(append_longest, with_kwargs=True)
    return [before, module.register_forward_hook(remove_longest)]


PART = "context_part"  # the entry of a cut batch with its Part
REFUSED = ("output_attentions", "output_router_logits", "use_cache")
ATTENTION_KINDS = ("full_attention", "sliding_attention")
CHOICES = {"indexed_attention": chooses_keys, "minimax_m3_sparse": asks_for_blocks}
STATE_KINDS = ("linear_attention", "hybrid")  # hybrid: with a state and with attention
OTHER_KINDS = ("mlp", "moe")  # layers that mix no tokens

log = logging.getLogger(__name__)


def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    seq_length: int,
    fpdt: Fpdt | None = None,
    balance: Balance = "zigzag",
    kernel: str = "auto",
    loss_chunks: int | None = None,
    dropout_seed: int = 0,
    indexer_loss: float = 0.0,
) -> ContextParallel:
    """Distribute a model's sequences over ``grid.context``. Its ranks call this, before or after DDP or fully_shard.

    ``model(**context.shard(batch)).loss`` is the mean over the complete batch on every rank. Gradients *averaged* over
    ``grid.context``, as by DDP and fully_shard, are those of this mean. Without labels the model returns the logits of
    a rank's tokens.

    Args:
        model: a causal language model, an encoder or one with a head of transformers, with its weights, whose attention
            uses AttentionInterface; or a PeftModel around one.
        grid: with tensor and pipeline axes of size 1.
        seq_length: sequence length of every batch.
        fpdt: decoder layers in chunks, offloaded to host memory; None: layers unchanged.
        balance, kernel: see ``cp.SequenceLayout`` and ``cp.attention``.
        loss_chunks: number of spans of tokens in which logits are computed; default: from the vocabulary size.
        dropout_seed: for dropout of attention weights. Other dropout uses each rank's PyTorch generator.
        indexer_loss: train indexers that choose keys: this factor times their loss (``cp.sparse_attention``), the mean
            over all tokens of its sum over layers, is added to the loss when gradients are on.

    Raises:
        ValueError: the model or its configuration is not supported.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    chunks = 1 if fpdt is None else fpdt.chunks(seq_length, grid)
    layout = SequenceLayout(seq_length, grid, balance, chunks=chunks)
    _check(model, grid)
    if indexer_loss and not (indexer_loss > 0 and any(map(chooses_keys, model.modules()))):
        raise ValueError(f"indexer_loss={indexer_loss} needs a factor above 0, and a model whose layers choose keys")
    context = ContextParallel(model, layout, kernel, loss_chunks, dropout_seed, fpdt, indexer_loss)
    try:
        context._install(fpdt)
    except BaseException:
        context.remove()
        raise
    return context


class ContextParallel:
    """A model distributed over a grid, from :func:`parallelize`. As a context manager it restores the model at its end.

    Attributes:
        model: the causal language model.
        layout: of its sequences. With the balance "documents" each packed batch has its own layout, and this one is for
            all other batches.
        grid: of the layout.
        kernel, fpdt: see :func:`parallelize`.
        shares: what the last batch saved whose rows share their beginnings; empty if there was none.
        indexer_loss: the mean loss of indexers in the last batch in which they learned, on every rank.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: SequenceLayout,
        kernel: str,
        loss_chunks: int | None,
        seed: int,
        fpdt: Fpdt | None,
        indexer_loss: float = 0.0,
    ) -> None:
        self.model, self.layout, self.kernel, self.fpdt = model, layout, kernel, fpdt
        self._loss_chunks, self._seed, self._teach = loss_chunks, seed, indexer_loss
        self._batches = 0
        self._part: Part | None = None  # during a forward pass
        self._active = True
        self.shares = ""
        self.indexer_loss: Tensor | None = None
        self._undo: list[Callable[[], Any]] = []

    @property
    def grid(self) -> Grid:
        return self.layout.grid

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of a complete batch, for the model. Every rank of ``grid.context`` passes the same batch.

        Args:
            batch: see :func:`~megatron.context_parallel.huggingface.rank_batch.cut`.

        Raises:
            ValueError: an entry is not supported.
        """
        own, part = cut(batch, self.layout, self._batches, labels_of(self.model).replace("base", "head"))
        self._batches += 1
        return {**own, PART: part}

    def gather(self, x: Tensor, sharded: Mapping[str, Any], dim: int = 1) -> Tensor:
        """The complete ``x`` (logits, hidden states), on every rank; ``sharded``: the result of :meth:`shard`."""
        return sharded[PART].layout.gather(x, dim)

    def log_probs(
        self,
        batch: Mapping[str, Any],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        gather: bool = True,
        shared: bool = False,
        model: nn.Module | None = None,
    ) -> TokenScores:
        """Log-probabilities [b, s] of each sample's tokens: entry i is that of token i + 1. Differentiable.

        It is 0 where the next token's label is -100, belongs to another document or is padding; no logits are computed
        there. Gradients *averaged* over ``grid.context`` are those of any loss that every rank computes alike.

        Args:
            batch: as for :meth:`shard`; ``labels`` mark the tokens that are wanted, by default all.
            temperature: logits are divided by it, after the model's own soft-cap or scale.
            entropy: compute the entropies of the distributions of the same tokens, too.
            gather: every rank gets all tokens, in order; else its own [b, s_local], and :meth:`total` sums a loss.
            shared: compute once what rows share at their beginning, as answers to one prompt do. The rows have any
                length, with padding by ``attention_mask`` on any side. :attr:`shares` says what it saves.
            model: the wrapper (DDP and so on) around the model, whose hooks should run.

        Raises:
            ValueError: indexers would learn from another loss (``indexer_loss``), which this one has no place for.
        """
        if self._teach and self.model.training and torch.is_grad_enabled():
            raise ValueError("log_probs with indexer_loss trains no indexer: leave indexer_loss out of parallelize")
        scoring, run = {"temperature": temperature, "entropy": entropy}, self.model if model is None else model
        if shared:
            if not gather:
                raise ValueError(
                    "shared=True gives whole rows, because ranks have parts of their tree: leave gather out"
                )
            return self._of_shared_rows(dict(batch), scoring, run)
        own = self.shard(only_within_documents(batch))
        part = own[PART]
        own[PART] = replace(part, scoring=scoring)
        scores = run(**own)
        if not gather:
            return scores
        complete = part.layout.gather(torch.stack([x for x in scores if x is not None]), dim=2)
        return TokenScores(*complete)

    def _of_shared_rows(self, batch: dict[str, Any], scoring: dict[str, Any], run: nn.Module) -> TokenScores:
        labels = batch.pop("labels", None)
        targets = F.pad(batch["input_ids"] if labels is None else labels, (0, 1), value=IGNORED)[:, 1:]
        rows = self.packed(batch)
        part, self._batches = replace(rows.part, scoring=scoring, number=self._batches), self._batches + 1
        scores = run(**rows.cut(shift_labels=(rows.same_sample(targets), IGNORED)), **{PART: part})
        wanted = torch.zeros_like(targets).flatten().index_copy(0, rows.places, (~rows.last).to(targets.dtype))
        wanted = wanted.view_as(targets) * targets.ne(IGNORED)
        return TokenScores(*(None if x is None else rows.unpacked(x) * wanted for x in scores))

    def packed(self, batch: dict[str, Any]) -> PackedRows:
        """The rows of a batch of any length in one sequence; what they share at their beginning is there once."""
        rows = PackedRows.of(self.layout, self.fpdt, batch, shared=True)
        if rows.saving is not None:
            if self.grid.context.rank == 0:
                log.log(logging.DEBUG if self.shares else logging.INFO, "rows share beginnings: %s", rows.saving)
            self.shares = str(rows.saving)
        return rows

    def total(self, local: Tensor) -> Tensor:
        """The sum of ``local`` over the ranks. Gradients *averaged* over ``grid.context`` are those of this sum."""
        return sum_for_averaged_gradients(self.grid.context, local)

    def run(self, own: dict[str, Any], part: Part) -> Any:
        """The model's outputs for this rank's ``input_ids``, ``position_ids``, perhaps ``shift_labels`` [b, s_local].

        For a caller that has cut a batch itself.
        """
        self._batches += 1
        return self._forward(self.model, self._own_forward, **own, context_part=replace(part, number=self._batches))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model computes whole sequences on each rank, as before; not between a forward and its backward pass."""
        model, cached = self.model, getattr(self.model.config, "use_cache", None)
        model.set_attn_implementation(self._attention_before)
        self._active = False
        if cached is not None:
            model.config.use_cache = self._cache_before
        try:
            yield
        finally:
            self._active = True
            model.set_attn_implementation(NAME)
            if cached is not None:
                model.config.use_cache = cached

    def remove(self) -> None:
        """Restore the model, after the last backward pass. A second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _install(self, fpdt: Fpdt | None) -> None:
        register()
        model = self.model
        self._attention_before = before = model.config._attn_implementation
        self._cache_before = getattr(model.config, "use_cache", None)
        self._own_forward = model.forward
        self._undo.append(lambda: model.set_attn_implementation(before))
        model.set_attn_implementation(NAME)
        for module in model.modules():
            if isinstance(module, PreTrainedModel) and module.config._attn_implementation != NAME:
                raise ValueError(
                    f"{type(module).__name__} does not compute attention through transformers' AttentionInterface: not "
                    "supported over ranks"
                )
        states = layers_with_state(model)
        if states and fpdt is not None:
            who = type(states[0]).__name__
            raise ValueError(f"{who} hands on a state, which FPDT does not support: leave fpdt out")
        for module in states:
            self._replace_forward(module, forward_with_ours)
        for module in filter(chooses_keys, model.modules()):
            if fpdt is not None and (hands_on_choice(module) or self._teach):
                what = "hands on its choice of keys" if hands_on_choice(module) else "learns from indexer_loss"
                raise ValueError(f"{type(module).__name__} {what}, which FPDT does not support: leave fpdt out")
            self._replace_forward(module, forward_by_choice)
        for module in filter(asks_for_blocks, model.modules()):
            if fpdt is not None:
                who = type(module).__name__
                raise ValueError(f"{who} chooses blocks of keys, which FPDT does not support: leave fpdt out")
            self._replace_forward(module, forward_with_question)
        if states:  # not every causal language model hands its keyword arguments on to its base model
            hook = model.base_model.register_forward_pre_hook(self._add_mixer, with_kwargs=True)
            self._undo.append(hook.remove)
        for queries, keys in refuse_mixing(model, fpdt is not None):
            head_plan(queries, keys, self.grid.ulysses.size)
        if getattr(model.config, "use_cache", False):
            self._set(model.config, "use_cache", False)
            if self.grid.context.rank == 0:
                log.warning("use_cache=False: there is no key/value cache while the model is distributed over ranks")
        if fpdt is not None:
            for layer, forward in chunked_layers(model, fpdt):
                self._replace_forward(layer, forward)
        if pooler := pooler_of(model):
            self._undo.append(pooler.register_forward_pre_hook(self._gathered).remove)
        for module in model.modules():
            if by_length(module):
                for handle in pass_length(module, self._longest):
                    self._undo.append(handle.remove)
        self._replace_forward(model, self._forward)

    def _set(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def _replace_forward(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """``module.forward(...)`` becomes ``function(module, its forward, ...)``, also in copies of the module."""
        before = vars(module).get("forward")  # for example from accelerate
        own = type(module).forward if before is None else getattr(before, "__func__", before)
        bound = before is None or hasattr(before, "__func__")

        active, context = True, self

        @wraps(own)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            usual = MethodType(own, self) if bound else own
            ours = active and context._active
            return function(self, usual, *args, **kwargs) if ours else usual(*args, **kwargs)

        installed = module.forward = MethodType(forward, module)

        def undo() -> None:
            nonlocal active
            active = False  # another function may have wrapped it in the meantime
            if vars(module).get("forward") is installed:
                del module.forward
                if before is not None:
                    module.forward = before

        self._undo.append(undo)

    def _add_mixer(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs if self._part is None else {**kwargs, MIXER: OverRanks(self._part)}

    def _gathered(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if self._part is None else (self._part.layout.gather(args[0], 1), *args[1:])

    def _longest(self) -> int:
        return self._part.longest if self._active else 1

    @contextmanager
    def _with_part(self, part: Part, lessons: list[Tensor] | None) -> Iterator[None]:
        self._part = part
        try:
            with masks_by(lambda window, ahead: Shared(part, self.kernel, window, ahead, self._seed, lessons)):
                yield
        finally:
            self._part = None

    def _forward(
        self,
        model: PreTrainedModel,
        own: Callable[..., Any],
        *args: Any,
        context_part: Part | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's forward, with the result of :meth:`shard`."""
        if args or context_part is None or kwargs.get("labels") is not None:
            raise ValueError(
                "this model is distributed over ranks: call it as model(**context.shard(batch)), or restore it by "
                "context.remove() first"
            )
        for name in (*REFUSED, "past_key_values", "logits_to_keep", "inputs_embeds", "attention_mask"):
            asked = kwargs.pop(name, None)
            if asked is not None and not (isinstance(asked, int) and asked == 0):  # 0 and False are allowed
                raise ValueError(f"{name} is not supported over ranks: leave it out")
        # With a mask, transformers does not search a rank's positions for document boundaries.
        kwargs |= {"attention_mask": torch.ones_like(kwargs["input_ids"]), "use_cache": False, "return_dict": True}
        learns = self._teach and torch.is_grad_enabled() and shift_labels is not None and context_part.scoring is None
        lessons: list[Tensor] | None = [] if learns else None
        with self._with_part(context_part, lessons):
            if labels_of(model) == "head":
                output, whole = model.base_model(**kwargs), context_part.whole
                if whole is not None:
                    return through_head(model, output, context_part.layout, whole)
                if not scores_tokens(model):
                    raise ValueError(f"the head of {type(model).__name__} needs a batch from context.shard")
                return SequenceClassifierOutputWithPast(logits=model.score(output.last_hidden_state))  # of each token
            if shift_labels is None:
                return own(**kwargs)
            output = model.base_model(**kwargs)
            if context_part.scoring is not None:
                hidden = output.last_hidden_state
                return token_scores(model, hidden, shift_labels, self._loss_chunks, **context_part.scoring)
            total = cross_entropy_sum(model, output.last_hidden_state, shift_labels, self._loss_chunks)
        count = max(context_part.labelled, 1) if num_items_in_batch is None else num_items_in_batch
        count = count.to(total.device) if isinstance(count, Tensor) else count
        if lessons is not None:
            taught = _mean_of_lessons(lessons, context_part)
            self.indexer_loss = sum_for_averaged_gradients(self.grid.context, taught.detach())
            total = total + self._teach * taught * context_part.labelled
        loss = sum_for_averaged_gradients(self.grid.context, total / count)
        return CausalLMOutputWithPast(loss=loss, hidden_states=output.hidden_states)


def _mean_of_lessons(lessons: list[Tensor], part: Part) -> Tensor:
    """This rank's share of the mean, over all tokens that are not padding, of indexers' losses, summed over layers."""
    if not lessons:
        raise ValueError("indexer_loss, but no indexer has a parameter that is trained: unfreeze them, or leave it out")
    if not all(loss.requires_grad for loss in lessons):
        raise ValueError("indexers learn nothing from gradient checkpointing with use_reentrant=True: use False")
    each = sum(lessons)
    if part.lengths is None:
        return each.sum() / (len(each) * part.layout.seq_length)
    lengths = torch.tensor(part.lengths, device=each.device)[:, None]
    return each[part.layout.positions.to(each.device) < lengths].sum() / sum(part.lengths)


def _check(model: nn.Module, grid: Grid) -> None:
    """Checks that do not run the model."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{type(model).__name__} is not a model of transformers: not supported")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder: not supported over ranks")
    if model.config._attn_implementation == NAME:
        raise ValueError("the model is already distributed over ranks: call context.remove() first")
    for name in ("tensor", "pipeline"):
        if getattr(grid, name).size > 1:
            raise ValueError(f"{name}={getattr(grid, name).size} is not supported with a model of transformers: use 1")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model has no weights yet (device meta): load them, then parallelize")
    config = model.config.get_text_config(decoder=True)
    for name in REFUSED[:2]:
        if getattr(config, name, False) or getattr(model.config, name, False):
            raise ValueError(f"the model's configuration has {name}=True, not supported over ranks: turn it off")
    for kind in getattr(config, "layer_types", None) or ():
        checks = {**CHOICES, **dict.fromkeys(STATE_KINDS, has_state)}
        known = kind in checks and any(map(checks[kind], model.modules()))
        if kind not in (*ATTENTION_KINDS, *OTHER_KINDS) and not known:
            raise ValueError(
                f"the model has layers of the kind {kind}, but over ranks only {' and '.join(ATTENTION_KINDS)} are "
                "supported"
            )
    if model.base_model is model and labels_of(model) != "base":
        raise ValueError(
            f"{type(model).__name__} has no base model {model.base_model_prefix}: not supported over ranks"
        )
