# SPDX-License-Identifier: Apache-2.0
"""One training step and one evaluation step over the pipeline schedules of megatron-core.

A token's way through a training step:

1. data/batches.py reads this rank's tokens of a sample (all, if documents matter); `shard_batch` keeps those it holds.
2. `forward_step` calls the model (model/gpt.py): embedding, megatron-core's layers, output layer.
3. In each layer context_parallel/core/core_attention.py computes attention over all ranks: see "One token's way through
   the code" in docs/inside/context-parallelism.md. With --fpdt, context_parallel/fpdt/chunked_layer.py runs the layer.
4. loss.py adds up the losses; megatron-core runs the backward passes and sums the gradients over DP x CP.
5. `train_step` updates the weights, unless watch.py finds the step bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from megatron.context_parallel.core.core_attention import forget_kept
from megatron.context_parallel.layout.documents import Samples, document_rows, passed_on
from megatron.training.arguments.schedule import schedule_unit
from megatron.training.data.batches import shard_batch
from megatron.training.loss import PairObjective, layer_loss, losses_ahead, mean_loss, sum_of_losses
from megatron.training.model.expert_load import ExpertLoad, load_of, move_biases, take_load
from megatron.training.model.updates.update import update
from megatron.training.settings.config import Config
from megatron.training.setup import Runtime
from megatron.training.watch import Watch

Batches = Iterator[dict[str, Tensor]]
Mark = Callable[[str], None]  # called with the name of each phase of a step as it begins
Measure = Callable[[dict[str, Tensor | None], Tensor], Tensor]
LossOf = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # of the model's output: as `sum_of_losses`


@dataclass(frozen=True)
class StepResult:
    """The numbers of a step, the same on every rank."""

    lm_loss: float  # mean over all unmasked tokens of the global batch; over its pairs of answers
    tokens: int  # unmasked tokens, or pairs
    grad_norm: float = 0.0
    zeros_in_grad: int | None = None
    skipped: bool = False  # fp16 overflow, or a bad batch: no update was made
    bad: str = ""  # what is bad about the batch
    experts: ExpertLoad | None = None  # of a model with experts
    further: dict[str, float] = field(default_factory=dict)  # losses of multi-token prediction, of pairs


class Diverged(ArithmeticError):
    """A step is bad, and its batch may not be left out. The step has changed no weight.

    Every rank raises it, except where a fault of one rank's memory changed its gradients after they were summed.

    Attributes:
        result: of the step.
        own: whether the loss of this rank's tokens is not finite.
    """

    def __init__(self, result: StepResult, own: bool = False) -> None:
        super().__init__(result.bad)
        self.result, self.own = result, own


def forward_step(
    runtime: Runtime,
    batches: Batches,
    model: nn.Module,
    mark: Mark | None = None,
    length: int | None = None,
    measure: Measure | None = None,
    objective: PairObjective | None = None,
) -> tuple[Tensor, LossOf]:
    """Run the model on the next micro-batch; returns its output and the function that computes the loss from it.

    Args:
        mark: called when the forward and the backward pass begin.
        length: tokens of each sample that count towards the loss, all by default.
        measure: computes the report from this rank's batch and the output, in place of the loss.
        objective: the loss, if it is not that of each token.
    """
    if mark is not None:
        mark("forward")
    names = ("tokens", "position_ids", "labels", "loss_mask", "document_ends", "numbers", "groups", "ahead")
    batch: dict[str, Tensor | None] = dict.fromkeys(names)
    if runtime.reads_data:
        restart = runtime.reset_positions
        whole = next(batches)
        if length is not None and "loss_mask" in whole:
            mask = whole["loss_mask"]
            whole = whole | {"loss_mask": mask * (torch.arange(mask.size(1)) < length).to(mask.dtype)}
        ahead = runtime.ahead if torch.is_grad_enabled() else 0
        batch.update(shard_batch(whole, runtime.layout, runtime.device, reset_positions=restart, ahead=ahead))
        batch["reference"] = whole.get("reference")
    output = model(
        batch["tokens"],
        batch["position_ids"],
        passed_on(_samples(batch, runtime)),  # in the place of core's dense mask
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        **({"ahead": batch["ahead"]} if runtime.ahead else {}),
    )
    if hasattr(batches, "prepare"):  # the next batch, while a GPU computes
        batches.prepare()
    if mark is not None and output.requires_grad:
        output.register_hook(lambda _: mark("backward"))  # its backward begins, in any pipeline schedule
    if measure is not None:
        return output, partial(_measured, measure, batch)
    return output, partial(sum_of_losses, batch["loss_mask"]) if objective is None else partial(objective.loss, batch)


def _samples(batch: dict[str, Tensor | None], runtime: Runtime) -> Samples:
    """What layers need to know of a batch's samples: their numbers for dropout, counted tokens for losses of layers."""
    numbers, ends = batch["numbers"], batch["document_ends"]
    return Samples(
        tuple(numbers.tolist()) if runtime.uses_dropout and numbers is not None else (),
        () if ends is None else tuple(document_rows(ends)),
        batch.get("plans") or {},
        batch["loss_mask"].t() if runtime.layer_loss is not None else None,
    )


def _measured(measure: Measure, batch: dict[str, Tensor | None], output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same form as `sum_of_losses`, which core's schedules expect, with nothing to differentiate."""
    return output.new_zeros(()), torch.zeros((), dtype=torch.int, device=output.device), measure(batch, output)


def train_step(
    runtime: Runtime,
    model_chunks: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    batches: Batches | list[Batches],
    config: Config,
    num_microbatches: int,
    mark: Mark | None = None,
    length: int | None = None,
    watch: Watch | None = None,
    objective: PairObjective | None = None,
) -> StepResult:
    """Forward, backward, gradient reduction and update for one global batch.

    ``length`` and ``objective`` are as in `forward_step`.

    Raises:
        Diverged: the batch is bad, and ``watch`` may not leave it out.
    """
    watch = watch or Watch(config)
    mark = with_profiler_ranges(mark)
    for chunk in model_chunks:
        chunk.zero_grad_buffer()
        if config.attention.keep_attention:
            forget_kept(chunk)
    optimizer.zero_grad()
    step = partial(forward_step, runtime, mark=mark, length=length, objective=objective)
    batches = with_reference(runtime, model_chunks, batches, config, num_microbatches, objective)
    reports = run_schedule(step, model_chunks, batches, config, num_microbatches, forward_only=False)
    loss, tokens, further = result_of(reports, runtime, objective)
    further |= losses_ahead(model_chunks, runtime) | layer_loss(model_chunks, runtime)
    if mark is not None:
        mark("optimizer")
    bad, table, load = "", None, None
    if config.model.num_experts:
        table = take_load(model_chunks, config.model, runtime.device)
        load = load_of(table, config.model)

    def allowed(grad_norm: float) -> bool:
        nonlocal bad
        bad = watch.judge(loss, grad_norm, runtime.device)
        return not bad

    updated, grad_norm, zeros = update(optimizer, allowed)
    result = StepResult(loss, tokens, float(grad_norm or 0.0), zeros, not updated, bad, load, further)
    if bad and not watch.skips:
        raise Diverged(result, own=not all(bool(report.isfinite().all()) for report in reports))
    if updated:
        if config.model.moe_router_enable_expert_bias and not config.model.lora_rank:
            move_biases(model_chunks, table, config.model)
        samples = num_microbatches * config.data.micro_batch_size * runtime.grid.data.size
        schedule.step(samples * schedule_unit(config, length))
    return result


def with_profiler_ranges(mark: Mark | None) -> Mark | None:
    """``mark``; while torch.profiler records, each phase also gets an empty range of its name.

    tools/compare_trace.py finds the phases by these ranges.
    """
    if not torch.autograd._profiler_enabled():
        return mark

    def mark_both(phase: str) -> None:
        with torch.profiler.record_function(phase):
            pass
        if mark is not None:
            mark(phase)

    return mark_both


@torch.no_grad()
def with_reference(
    runtime: Runtime,
    model_chunks: Sequence[nn.Module],
    batches: Batches | list[Batches],
    config: Config,
    num_microbatches: int,
    objective: PairObjective | None,
) -> Batches | list[Batches]:
    """The batches of a step with what the reference model of ``objective`` says about them."""
    if objective is None:
        return batches

    def run(model: Sequence[nn.Module], given: Batches | list[Batches], measure: Measure) -> list[Tensor]:
        step = partial(forward_step, runtime, measure=measure)
        return run_schedule(step, model, given, config, num_microbatches, forward_only=True)

    return objective.prepared(model_chunks, batches, num_microbatches, run)


def result_of(
    reports: list[Tensor], runtime: Runtime, objective: PairObjective | None
) -> tuple[float, int, dict[str, float]]:
    """Mean loss, number of tokens (or pairs), and further values for the log."""
    return (*mean_loss(reports, runtime), {}) if objective is None else objective.result(reports)


@torch.no_grad()
def evaluate(
    runtime: Runtime,
    model_chunks: Sequence[nn.Module],
    batches: Batches | list[Batches],
    config: Config,
    num_microbatches: int,
    iterations: int,
    objective: PairObjective | None = None,
) -> StepResult:
    """Mean loss over ``iterations`` global batches."""
    for chunk in model_chunks:
        chunk.eval()
    reports: list[Tensor] = []
    step = partial(forward_step, runtime, objective=objective)
    for _ in range(iterations):
        given = with_reference(runtime, model_chunks, batches, config, num_microbatches, objective)
        reports += run_schedule(step, model_chunks, given, config, num_microbatches, forward_only=True)
    for chunk in model_chunks:
        chunk.train()
    loss, tokens, further = result_of(reports, runtime, objective)
    return StepResult(loss, tokens, further=further)


def run_schedule(
    step: Callable[..., tuple[Tensor, LossOf]],
    model_chunks: Sequence[nn.Module],
    batches: Batches | list[Batches],
    config: Config,
    num_microbatches: int,
    *,
    forward_only: bool,
) -> list[Tensor]:
    """Run ``step`` on each micro-batch; returns their reports, which are empty except on the last pipeline stage."""
    # With --fpdt-stream-hidden some gradients are in host memory. autograd computes these in the calling thread, and
    # those of the parameters, with DDP's reductions, in the GPU's thread. The order of collectives would then differ
    # between ranks, so one thread runs the backward pass.
    with torch.autograd.set_multithreading_enabled(not config.chunks.fpdt_stream_hidden):
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches,
            model=list(model_chunks) if len(model_chunks) > 1 else model_chunks[0],
            num_microbatches=num_microbatches,
            seq_length=config.data.seq_length,
            micro_batch_size=config.data.micro_batch_size,
            forward_only=forward_only,
        )
