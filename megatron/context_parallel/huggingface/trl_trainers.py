# SPDX-License-Identifier: Apache-2.0
"""A mixin for TRL's DPOTrainer, GRPOTrainer, RewardTrainer and SFTTrainer.

class LongDPO(TrlMixin, DPOTrainer): ...
LongDPO(context=parallelize(model, grid, seq_length=S), model=model, args=args, train_dataset=data, ...).train()

These trainers call their model with a whole batch and read log-probabilities, or the scores of sequences, from its
output. So only the model's forward is replaced: it packs the batch without padding, as a tree if samples share their
prompt; each rank computes its part, and all get the whole result. Ranks of one context-parallel group read the same
samples and draw the same random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import set_seed
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutputWithPast

from megatron.context_parallel.huggingface.decoder_loss import scores_tokens
from megatron.context_parallel.huggingface.parallel import ContextParallel, parallelize
from megatron.context_parallel.huggingface.rank_batch import IGNORED
from megatron.context_parallel.huggingface.trainer import ContextParallelMixin

REFUSED = {  # settings of TRL's configurations, and why they are not supported
    "use_vllm": "would give each rank other completions of the same prompts",
    "use_transformers_continuous_batching": "would give each rank other completions of the same prompts",
    "use_weighting": "needs sums over the squared probabilities of the vocabulary",
    "activation_offloading": "has not been tried: use fpdt, or gradient checkpointing",
    "cast_lm_head_to_fp32": "has another output layer than the model",
    "sync_ref_model": "copies weights into a model that is distributed over ranks",
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

    for_trl = True

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
        self._over_ranks = False
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
        self._over_ranks = True
        if getattr(settings, "precompute_ref_log_probs", False):
            own, held_out = settings.precompute_ref_batch_size, self.eval_dataset
            size = own or settings.per_device_train_batch_size
            self.train_dataset = self._precompute_ref_logps(self.train_dataset, "train", size)
            size = own or settings.per_device_eval_batch_size
            if isinstance(held_out, dict):
                self.eval_dataset = {
                    name: self._precompute_ref_logps(data, name, size) for name, data in held_out.items()
                }
            elif held_out is not None:
                self.eval_dataset = self._precompute_ref_logps(held_out, "eval", size)
        if group is not None:
            set_seed(self.args.seed + grid.data.rank)  # TRL has a seed for each process; a group draws the same tokens

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        """As TRL's; its constructor asks too early, before the model is distributed, and gets the data unchanged."""
        if not self._over_ranks:
            return dataset
        accelerator, prepare = self.accelerator, self.accelerator.prepare
        accelerator.prepare = lambda loader: self._split_over_data_axis(prepare(loader))
        accelerator.gather_for_metrics = self._gather_samples
        try:
            return super()._precompute_ref_logps(dataset, name, batch_size)
        finally:
            del accelerator.prepare, accelerator.gather_for_metrics

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
    scores = scores_tokens(model)

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
    packed = context.packed(batch)
    real = packed.same_sample(targets)
    part = replace(packed.part, scoring={"temperature": temperature, "entropy": True, "greedy": True})
    values = context.run(packed.cut(shift_labels=(real, IGNORED)), part)
    mask = targets.ne(IGNORED)[:, :-1]
    log_probs, entropy, greedy = (packed.unpacked(x)[:, :-1] * mask for x in values)
    loss = -log_probs.sum() / (mask.sum().clamp(min=1) if count is None else count)
    unknown = torch.full_like(log_probs, torch.nan).detach()  # only logged
    return Scored(loss, log_probs, entropy, unknown, greedy > 0, mask)


def _sequence_scores(context: ContextParallel, _: float, **batch: Any) -> SequenceClassifierOutputWithPast:
    """The score at the last token of each sample that is not padding."""
    packed = context.packed(batch)
    every = packed.unpacked(context.run(packed.cut(), packed.part).logits)
    pad, tokens = context.model.config.get_text_config().pad_token_id, batch["input_ids"]
    places = torch.arange(tokens.size(1), device=tokens.device)
    last = (places * (tokens != pad)).argmax(1) if pad is not None else places[-1].expand(len(tokens))
    return SequenceClassifierOutputWithPast(logits=every[torch.arange(len(tokens), device=tokens.device), last])
