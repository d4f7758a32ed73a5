# SPDX-License-Identifier: Apache-2.0
"""A mixin for ``transformers.Trainer`` and its subclasses.

class LongTrainer(ContextParallelMixin, Trainer): ...
LongTrainer(context=parallelize(model, grid, seq_length=S), model=model, args=args, train_dataset=data).train()

Ranks of one context-parallel group read the same samples and cut them when the loss is computed. Only methods that are
documented for this are overridden: ``compute_loss``, ``prediction_step``, ``evaluation_loop``, the data loaders and
``get_cp_size``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megatron.context_parallel.huggingface.parallel import ContextParallel
from megatron.platform.collectives import gathered, gathered_objects

REFUSED = {  # settings of TrainingArguments, and why they are not supported
    "use_liger_kernel": "replaces parts of the model that are distributed over ranks",
    "neftune_noise_alpha": "draws noise that depends on the length of the sequence, of which a rank has a part",
    "include_num_input_tokens_seen": "would count tokens once for each rank that shares them",
    "parallelism_config": "lets accelerate distribute the model, which the context does already",
}


class ContextParallelMixin:
    """A mixin to be put before a Trainer in the list of base classes.

    Args:
        context: from ``parallelize``, for the trained model.

    Raises:
        ValueError: a setting of the Trainer is not supported, or the Trainer is one of TRL.
    """

    for_trl = False

    def __init__(self, *args: Any, context: ContextParallel, **kwargs: Any) -> None:
        self.context = context
        if not self.for_trl and any(kind.__module__.startswith("trl.") for kind in type(self).__mro__):
            raise ValueError("trainers of TRL read their model's output for whole batches: use TrlMixin for them")
        super().__init__(*args, **kwargs)
        grid = context.grid
        if self.model_init is not None or not any(module is context.model for module in self.model.modules()):
            raise ValueError("the Trainer and the context have different models: give both the same one")
        for name, why in REFUSED.items():
            if getattr(self.args, name) not in (None, False, "no"):
                raise ValueError(f"{name} {why}: leave it out")
        if self.args.world_size != grid.world_size:
            raise ValueError(
                f"the Trainer has {self.args.world_size} processes, the grid {grid.world_size}: make them equal"
            )
        if self.args.label_smoothing_factor or self.compute_loss_func is not None:
            name = "label_smoothing_factor" if self.args.label_smoothing_factor else "compute_loss_func"
            raise ValueError(f"{name} needs the complete logits, which never exist over ranks: leave it out")

    def get_cp_size(self) -> int:
        """Number of ranks that read the same samples."""
        return self.context.grid.context.size

    def get_train_dataloader(self) -> DataLoader:
        return self._split_over_data_axis(super().get_train_dataloader())

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._split_over_data_axis(super().get_eval_dataloader(*args, **kwargs))

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        return self._split_over_data_axis(super().get_test_dataloader(*args, **kwargs))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        # The loop calls this function for all that it joins, and sets it back to accelerate's at its end.
        self.gather_function = partial(self._gather_samples, use_gather_object=self.args.eval_use_gather_object)
        return super().evaluation_loop(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The loss of a complete batch, of which each rank computes a part, scaled as Trainer expects."""
        grid, count = self.context.grid, num_items_in_batch
        if count is not None and not self.args.average_tokens_across_devices:
            count = count * grid.context.size  # Trainer has divided this process' own count by get_cp_size
        outputs = model(**self.context.shard({**inputs, "num_items_in_batch": count}))
        loss = outputs.loss
        if count is not None and self.args.average_tokens_across_devices:
            loss = loss * grid.data.size  # the count covers all data-parallel ranks
        return (loss, outputs) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """The loss of a batch, and its complete logits and labels unless only the loss is wanted.

        Losses are computed without complete logits, so that these need a second forward pass.
        """
        inputs = self._prepare_inputs(inputs)
        labels = inputs.get("labels")
        loss = None if labels is None else super().prediction_step(model, inputs, True)[0]
        if prediction_loss_only:
            return loss, None, None
        ignored = ignore_keys or getattr(self.context.model.config, "keys_to_ignore_at_inference", [])
        own = self.context.shard({name: value for name, value in inputs.items() if name != "labels"})
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**own)
        values = tuple(value for name, value in outputs.items() if name not in ignored)
        values = _each(values, lambda x: self.context.gather(x.detach(), own))
        return loss, values[0] if len(values) == 1 else values, labels

    def _gather_samples(self, values: Any, use_gather_object: bool = False) -> Any:
        """Results of all samples in order, as by accelerate's ``gather_for_metrics``, but each sample once.

        That function would join the results of all processes, also of those that read the same samples.
        """
        axis, state = self.context.grid.data, self.accelerator.gradient_state
        kept = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        if use_gather_object:
            objects = [values] if axis.size == 1 else gathered_objects(values, axis.group)
            return [value for part in objects for value in part][:kept]

        def gather(x: Tensor) -> Tensor:
            x = x if x.dim() else x[None]
            return (x if axis.size == 1 else gathered(x, axis.group))[:kept]

        return _each(values, gather)

    def _split_over_data_axis(self, loader: DataLoader) -> DataLoader:
        """Distribute batches over the data axis; accelerate distributes them over all processes."""
        grid = self.context.grid
        if grid.world_size == 1:
            return loader
        sampler = loader.batch_sampler if hasattr(loader.batch_sampler, "process_index") else loader.dataset
        if not hasattr(sampler, "process_index"):
            raise ValueError(
                f"{type(loader).__name__} does not use accelerate's samplers: leave dispatch_batches and "
                "train_sampling_strategy at their defaults"
            )
        if sampler is loader.dataset and sampler.split_batches:
            raise ValueError("split_batches divides an iterable dataset by all processes: leave it at its default")
        sampler.num_processes, sampler.process_index = grid.data.size, grid.data.rank
        if grid.data.size == 1:  # as on one process, where accelerate does not fill the last batch with first samples
            if sampler is loader.dataset:
                sampler.batch_size = 1
            else:
                sampler.even_batches = False
        return loader


def _each(values: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``function`` of each tensor in nested tuples, lists and dictionaries, as they arrive in an evaluation."""
    if isinstance(values, Mapping):
        return type(values)({name: _each(value, function) for name, value in values.items()})
    if isinstance(values, (tuple, list)):
        return type(values)(_each(value, function) for value in values)
    return function(values)
