# SPDX-License-Identifier: Apache-2.0
"""A mixin for TRL's DPOTrainer, GRPOTrainer, RewardTrainer and SFTTrainer.

class LongDPO(TrlMixin, DPOTrainer): ...
LongDPO(context=parallelize(model, grid, seq_length=S), model=model, args=args, train_dataset=data, ...).train()

These trainers call their model with a whole batch and read log-probabilities, or the scores of sequences, from its
output. So only the model's forward is replaced: it packs the batch without padding, each rank computes its part, and
all get the whole result. Ranks of one context-parallel group read the same samples and draw the same random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import set_seed
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutputWithPast

from megatron.context_parallel.huggingface.parallel import ContextParallel, parallelize
from megatron.context_parallel.huggingface.probe import scores_sequences
from megatron.context_parallel.huggingface.rank_batch import IGNORED, Part
from megatron.context_parallel.huggingface.trainer import ContextParallelMixin
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.decisions.division import length_unit

KNOWN = ("input_ids", "attention_mask", "position_ids", "labels", "use_cache", "num_items_in_batch", "return_dict")
REFUSED = {  # settings of TRL's configurations, and why they are not supported
    "use_vllm": "would give each rank other completions of the same prompts",
    "use_transformers_continuous_batching": "would give each rank other completions of the same prompts",
    "use_weighting": "needs sums over the squared probabilities of the vocabulary",
    "activation_offloading": "has not been tried: use fpdt, or gradient checkpointing",
    "cast_lm_head_to_fp32": "has another output layer than the model",
    "sync_ref_model": "copies weights into a model that is distributed over ranks",
    "precompute_ref_log_probs": "gathers what ranks of one group compute together: leave the reference to the steps",
}


@dataclass
class Scored(ModelOutput):
    """What TRL reads from a model with its fused output layer; per-token fields are [b, s - 1]."""

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


class TrlMixin(ContextParallelMixin):
    """A mixin to be put before a trainer of TRL in the list of base classes.

    Args:
        context: from ``parallelize``, for the trained model. Batches may have other lengths than its seq_length.

    Raises:
        ValueError: a setting of the trainer is not supported.
    """

    def __init__(self, *args: Any, context: ContextParallel, **kwargs: Any) -> None:
        settings = kwargs.get("args", args[1] if len(args) > 1 else None)
        if settings is None:
            raise ValueError(f"{type(self).__name__} needs args=, the configuration of its trainer")
        grid = context.grid
        for name, why in REFUSED.items():
            if getattr(settings, name, None):
                raise ValueError(f"{name} {why}: leave it out")
        if (group := getattr(settings, "num_generations", None)) is not None:  # GRPO
            own = settings.per_device_train_batch_size * settings.steps_per_generation
            held_out = settings.per_device_eval_batch_size if settings.eval_strategy != "no" else 0
            for name, size, of in (
                ("per_device_train_batch_size x steps_per_generation", own, group),
                ("per_device_eval_batch_size", held_out, getattr(settings, "num_generations_eval", None) or group),
            ):
                if size % of:
                    raise ValueError(f"{name} is {size}, but over ranks it must be a multiple of num_generations, {of}")
            if getattr(settings, "scale_rewards", None) == "batch":
                raise ValueError("scale_rewards='batch' would count samples once for each rank: use 'group'")
            settings.generation_batch_size = own * grid.data.size  # TRL multiplies by all processes
        with context.paused():  # the reference model gets the settings of the model
            super().__init__(*args, context=context, **kwargs)
        temperature = getattr(self, "temperature", 1.0)
        over_ranks(context, temperature)
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            reference = self.accelerator.unwrap_model(reference)
            self.reference = parallelize(
                reference,
                grid,
                seq_length=context.layout.seq_length,
                fpdt=context.fpdt,
                balance=context.layout.balance,
                kernel=context.kernel,
            )
            over_ranks(self.reference, temperature)
        if group is not None:
            set_seed(self.args.seed + grid.data.rank)  # TRL has a seed for each process; a group draws the same tokens

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if num_items_in_batch is not None:  # Trainer has divided it by get_cp_size, but each rank has the whole loss
            num_items_in_batch = num_items_in_batch * self.context.grid.context.size
        loss = super(ContextParallelMixin, self).compute_loss
        return loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        return super(ContextParallelMixin, self).prediction_step(*args, **kwargs)


def over_ranks(context: ContextParallel, temperature: float = 1.0) -> None:
    """Replace a model's forward by one that takes whole batches and computes them over the ranks.

    Calls without TRL's ``fused_lm_head`` run on each rank alone, as ``generate`` does; all ranks of a group then take
    the tokens that its first rank has generated.
    """
    model = context.model
    before, generate = model.forward, getattr(model, "generate", None)
    scores = scores_sequences(model)

    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head or scores:
            if args:
                raise ValueError("this model is distributed over ranks: call it with keyword arguments")
            return (_sequence_scores if scores else _token_scores)(context, temperature, **kwargs)
        with context.paused():
            return before(*args, **kwargs)

    def generated(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        axis = context.grid.context
        with context.paused():
            model.forward, ours = before, model.forward
            try:
                tokens = generate(*args, **kwargs)
            finally:
                model.forward = ours
        if axis.size > 1:
            tokens = tokens.contiguous()
            dist.broadcast(tokens, axis.global_rank(0), group=axis.group)
        return tokens

    forward.__wrapped__ = type(model).forward  # generate reads its signature
    model.forward = MethodType(forward, model)
    if generate is not None and not scores:
        model.generate = MethodType(generated, model)


def _token_scores(context: ContextParallel, temperature: float, labels: Tensor, **batch: Any) -> Scored:
    count = batch.pop("num_items_in_batch", None)
    targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    packed = Packed.of(context, batch)
    real = packed.same_sample(targets)
    part = replace(packed.part, scoring={"temperature": temperature, "entropy": True, "greedy": True})
    values = context.run(packed.cut(shift_labels=(real, IGNORED)), part)
    log_probs, entropy, greedy = (packed.unpacked(x)[:, :-1] for x in values)
    mask = targets.ne(IGNORED)[:, :-1]
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if count is None else count)
    unknown = torch.full_like(log_probs, torch.nan).detach()  # only logged
    return Scored(loss, log_probs, entropy, unknown, greedy > 0, mask)


def _sequence_scores(context: ContextParallel, _: float, **batch: Any) -> SequenceClassifierOutputWithPast:
    """The score at the last token of each sample that is not padding."""
    packed = Packed.of(context, batch)
    every = packed.unpacked(context.run(packed.cut(), packed.part).logits)
    pad, tokens = context.model.config.get_text_config().pad_token_id, batch["input_ids"]
    places = torch.arange(tokens.size(1), device=tokens.device)
    last = (places * (tokens != pad)).argmax(1) if pad is not None else places[-1].expand(len(tokens))
    return SequenceClassifierOutputWithPast(logits=every[torch.arange(len(tokens), device=tokens.device), last])


@dataclass
class Packed:
    """The tokens of a batch in one sequence, sample after sample and without padding, of which each rank has a part.

    Attributes:
        shape: [b, s] of the batch.
        places: [n] of each packed token in the flattened batch.
        tokens, positions: [n].
        part: of this rank.
        context: of the model.
    """

    shape: tuple[int, int]
    places: Tensor
    tokens: Tensor
    positions: Tensor
    part: Part
    context: ContextParallel

    @classmethod
    def of(cls, context: ContextParallel, batch: dict[str, Any]) -> Packed:
        """Pack a batch; where ``position_ids`` restart, a new document begins."""
        for name, value in batch.items():
            if name not in KNOWN and value is not None and value is not False:
                raise ValueError(f"the trainer's {name} is not supported over ranks: use text, without router losses")
        tokens, mask, positions = (batch.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
        mask = torch.ones_like(tokens) if mask is None else mask
        if mask.shape != tokens.shape:
            raise ValueError(f"attention_mask {list(mask.shape)} is not that of {list(tokens.shape)} tokens")
        if positions is None:
            positions = mask.cumsum(1) - 1
        positions = positions.expand_as(tokens)
        places = mask.flatten().nonzero().squeeze(1)
        chosen = positions.flatten()[places]
        row = places // tokens.size(1)
        begins = (chosen.diff() != 1) | (row.diff() != 0)
        ends = [*(begins.nonzero().squeeze(1) + 1).tolist(), len(places)]
        layout = _layout(context, len(places))
        if layout.seq_length > len(places):
            ends.append(layout.seq_length)  # the rest of the last ranks' parts
        layout = layout.of_documents(tuple(ends))
        part = Part(layout, (tuple(ends),), None, int(chosen.max()) + 1, 0)
        return cls(tokens.shape, places, tokens.flatten()[places], chosen, part, context)

    def same_sample(self, targets: Tensor) -> Tensor:
        """[n]: targets [b, s] of the packed tokens; -100 where the next token is of another document."""
        packed = targets.flatten()[self.places].clone()
        ends = [end for end in self.part.ends[0] if end <= len(packed)]
        packed[torch.tensor(ends, device=packed.device) - 1] = IGNORED
        return packed

    def cut(self, **others: tuple[Tensor, int]) -> dict[str, Tensor]:
        """This rank's part of the tokens, of their positions, and of other values [n] with what fills their rest."""
        values = {"input_ids": (self.tokens, 0), "position_ids": (self.positions, 0), **others}
        length = self.part.layout.seq_length
        return {
            name: self.part.layout.shard(F.pad(x, (0, length - len(x)), value=rest)[None], dim=1)
            for name, (x, rest) in values.items()
            if x is not None
        }

    def unpacked(self, own: Tensor | None) -> Tensor:
        """[b, s, ...] on every rank, from this rank's part [1, s_local, ...]; 0 at padding. Differentiable."""
        complete = self.part.layout.gather(own, dim=1)[0, : len(self.places)]
        rows = self.shape[0] * self.shape[1]
        spread = complete.new_zeros((rows, *complete.shape[1:])).index_copy(0, self.places, complete)
        return spread.unflatten(0, self.shape)


def _layout(context: ContextParallel, length: int) -> SequenceLayout:
    """The context's layout for the next length that its grid can split."""
    grid, layout = context.grid, context.layout
    unit = length_unit(grid.ulysses.size, grid.ring.size, layout.balance)
    length = ceil(length / unit) * unit
    chunks = 1 if context.fpdt is None else context.fpdt.chunks(length, grid)
    return replace(layout, seq_length=length, chunks=chunks)
