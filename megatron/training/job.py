# SPDX-License-Identifier: Apache-2.0
"""A training job: what a run builds before its first step and keeps between steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import (
    get_data_parallel_group,
    get_expert_data_parallel_group,
    get_expert_tensor_model_pipeline_parallel_group,
    get_expert_tensor_parallel_group,
    get_model_parallel_group,
    get_tensor_model_parallel_group,
)
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import to_local_if_dtensor
from torch import nn
from torch.utils.data import Dataset

from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.context_parallel.layout.spans import Spans, union
from megatron.training.arguments.schedule import BatchSizes, check_stage, length_in_step, samples_after, schedule_unit
from megatron.training.arguments.validate import data_parallel_size
from megatron.training.arguments.validate.host_memory import available_bytes, check_host_memory
from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.arguments_of import unchecked, vocabulary
from megatron.training.checkpoint.checkpoint_folder import restore
from megatron.training.checkpoint.checksums import choose_whole
from megatron.training.checkpoint.in_memory.copies import Copies, open_copies
from megatron.training.checkpoint.in_memory.restart import newest
from megatron.training.checkpoint.in_memory.state import TrainingState
from megatron.training.checkpoint.megatron_lm.places import iteration_of
from megatron.training.checkpoint.owner import Owner, claim_folder, identity
from megatron.training.checkpoint.run_state import Progress
from megatron.training.data.batches import micro_batches
from megatron.training.data.datasets import build_datasets
from megatron.training.data.index_files import named_sets
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.evaluation.eval_plan import EvalPlan, check_held_out, make_plan
from megatron.training.evaluation.reference_model import pair_objective
from megatron.training.loss import PairObjective
from megatron.training.model.build import build_model
from megatron.training.model.optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
from megatron.training.refusal import Refusal, refuse_together
from megatron.training.report.layer_traffic import describe_layers
from megatron.training.settings.config import Config
from megatron.training.settings.kinds.layer_patterns import linear_layers
from megatron.training.setup import Runtime, batch_plans


@dataclass(kw_only=True)
class Job:
    """What a run keeps between its steps. :func:`prepare` makes it."""

    config: Config
    runtime: Runtime
    model_chunks: list[nn.Module]
    optimizer: MegatronOptimizer
    schedule: OptimizerParamScheduler | None
    progress: Progress
    datasets: tuple[Dataset | None, Dataset | None, Dataset | None]
    named: dict[str, dict[str, Dataset | None]]  # several sets: by "validation" and "test", then by name
    batch_sizes: BatchSizes
    iterations: int
    vocab_size: int
    eod: int
    copies: Copies | None = None  # of the state, in the memory of the hosts
    on_disk: int | None = None  # iteration of the checkpoint in --save, if a newer copy in memory was loaded
    eval_plan: EvalPlan | None = None  # of --eval-tasks
    owner: Owner | None = None  # of the folder --save; None if nothing is saved
    objective: PairObjective | None = None  # of pairs of answers


def prepare(config: Config, runtime: Runtime) -> Job:
    """Build tokenizer, data, model and optimizer of a run, and load its checkpoint. The job then owns its save folder.

    Raises:
        Refusal: on every rank, before the first collective in which another rank would wait.
    """
    owner = None
    if config.checkpoint.save and not config.run.skip_train:
        owner = claim_folder(config.checkpoint.save, config.notes)
    try:
        return _prepare(config, runtime, owner)
    except BaseException:
        if owner is not None:
            owner.release()
        raise


def _prepare(config: Config, runtime: Runtime, owner: Owner | None) -> Job:
    def read_inputs() -> tuple[Path | None, Tokenizer, EvalPlan | None]:
        if runtime.offload is not None:
            check_host_memory(config)
        latest = checkpoint.find(config.checkpoint, config.notes)
        tokenizer = build_tokenizer(config.data, config.model.vocab_size)
        return latest, tokenizer, make_plan(config, tokenizer) if config.evaluation.eval_tasks else None

    if owner is not None and dist.get_rank() == 0:
        with suppress(OSError):  # the first save reports it
            restore(Path(config.checkpoint.save))
    dist.barrier()  # ranks look for a checkpoint after rank 0 has restored the folder
    latest, tokenizer, plan = refuse_together(read_inputs)
    latest, run = agree_on_run(latest, config, owner)
    copies = open_copies(config, str(runtime.grid), available_bytes, run)
    on_disk = iteration_of(latest)
    in_memory = newest(copies, on_disk, config.notes) if copies else None
    path = choose_whole(latest, config.checkpoint, config.notes) if latest and not in_memory else None
    described = path
    if in_memory and latest:  # of the same model
        with suppress(Refusal):
            described = unchecked(latest)
    tokenizer, vocab_size = refuse_together(lambda: vocabulary(described, tokenizer, config))
    data = config.data
    of_all_ranks = data.micro_batch_size * data_parallel_size(config, dist.get_world_size())
    batch_sizes = BatchSizes(data, of_all_ranks)
    reset = config.checkpoint.reset_iteration
    done = checkpoint.progress_in(path, config.checkpoint) if path and not reset else Progress()
    done = in_memory.progress if in_memory else done
    if config.stage is not None:
        check_stage(config.stage, done.iteration, done.consumed_train_samples, done.consumed_train_tokens)
    iterations, samples = length_of_run(config, batch_sizes, done)
    held_out = config.run.eval_iters * config.data.global_batch_size
    wanted = (samples, evaluations(config, iterations) * held_out, held_out)
    datasets = build_datasets(config, tokenizer, wanted, needed=runtime.reads_data)
    if plan is not None:
        check_held_out(plan, datasets[1], runtime.device)
    named = named_datasets(config, tokenizer, wanted, runtime.reads_data, datasets)
    model = build_model(config, runtime.grid, runtime.layout, vocab_size, runtime.device, runtime.offload)
    model_chunks = wrap_for_data_parallelism(model, config)
    optimizer = build_optimizer(model_chunks, config)
    schedule = None if config.run.skip_train else build_schedule(optimizer, config)
    progress = Progress()
    if in_memory:
        TrainingState(model_chunks, optimizer, schedule, config).load(in_memory.path)
        progress = in_memory.progress
        config.notes.append(f"{in_memory.line}; the disk has {f'iteration {on_disk}' if latest else 'no checkpoint'}")
    elif path:
        progress = checkpoint.load(path, model_chunks, optimizer, schedule, config)
        config.notes.append(f"loaded {path}, going on after iteration {progress.iteration}")
        if reset:
            progress = from_zero(schedule, config)
    elif config.checkpoint.load:
        config.notes.append(f"--load {config.checkpoint.load} holds no checkpoint: starting from iteration 0")
    progress.run = run
    batch_sizes.update(progress.consumed_train_samples, False)
    return Job(
        config=config,
        runtime=runtime,
        model_chunks=model_chunks,
        optimizer=optimizer,
        schedule=schedule,
        progress=progress,
        datasets=datasets,
        named=named,
        batch_sizes=batch_sizes,
        iterations=iterations,
        vocab_size=vocab_size,
        eod=tokenizer.eod,
        copies=copies,
        on_disk=on_disk if in_memory else None,
        eval_plan=plan,
        owner=owner,
        objective=pair_objective(config, runtime, model_chunks, vocab_size, progress.iteration),
    )


def agree_on_run(latest: Path | None, config: Config, owner: Owner | None) -> tuple[Path | None, str]:
    """The checkpoint to load and the identity of the run, as rank 0 sees them. All ranks call it.

    A folder in a network file system may look different to each rank.

    Raises:
        Refusal: on every rank; --save holds checkpoints of another run, or newer ones.
    """
    settings, first = config.checkpoint, dist.get_rank() == 0
    run = refuse_together(lambda: identity(latest, settings, config.notes, saves=owner is not None) if first else "")
    agreed = [(latest, run)]
    dist.broadcast_object_list(agreed)
    if owner is not None:
        owner.run = agreed[0][1]
    return agreed[0]


def from_zero(schedule: OptimizerParamScheduler | None, config: Config) -> Progress:
    """The counts of a run that continues with --reset-iteration.

    A learning-rate schedule in samples continues and one in tokens starts again, as in Megatron-DeepSpeed.
    """
    if schedule is not None:
        if schedule_unit(config) > 1:
            schedule.num_steps = 0
            schedule.step(0)
        config.notes.append(
            "--reset-iteration: iterations, samples and tokens count from 0; the learning rate's schedule, in "
            + ("tokens, starts again" if schedule_unit(config) > 1 else "samples, continues")
        )
    return Progress()


def named_datasets(
    config: Config, tokenizer: Tokenizer, wanted: tuple[int, int, int], needed: bool, first: tuple
) -> dict[str, dict[str, Dataset | None]]:
    """Several sets of validation or test data, by kind and name.

    Args:
        first: the training, validation and test data that are built already; the latter two are sets number 0.
    """
    sets: dict[str, dict[str, Dataset | None]] = {}
    for kind, index, split in (("validation", 1, "valid"), ("test", 2, "test")):
        for number, name in enumerate(refuse_together(lambda split=split: named_sets(config.data, split))):
            samples = tuple(count if at == index else 0 for at, count in enumerate(wanted))
            built = build_datasets(config, tokenizer, samples, needed=needed, number=number) if number else first
            sets.setdefault(kind, {})[name] = built[index]
    return sets


def length_of_run(config: Config, batch_sizes: Any, done: Progress = Progress()) -> tuple[int, int]:
    """(iterations, samples) of the run, whichever of --train-iters, --train-samples and --train-tokens ends it first.

    Both are 0 for --skip-train. With --seq-length-schedule: its iterations until the end of the stage, and the samples
    of the stage.

    Args:
        done: progress so far, possibly with another batch size or sequence length.
    """
    run, batch = config.run, config.data.global_batch_size
    if run.skip_train:
        return 0, 0
    if config.stage is not None:
        return config.stage.end, samples_after(config, config.stage.end) - samples_after(config, config.stage.start)
    ramp = config.data.rampup_batch_size is not None or config.data.step_batch_size_schedule is not None
    iterations, samples, tokens = math.inf, math.inf, math.inf
    if run.train_iters is not None:
        iterations = run.train_iters
    elif run.train_samples is not None and not ramp:
        iterations = done.iteration + max(run.train_samples - done.consumed_train_samples, 0) // batch
    elif run.train_samples is not None:
        samples = run.train_samples
    count, consumed = done.iteration, done.consumed_train_samples
    if config.data.rampup_seq_length is not None:
        ramp, tokens = True, run.train_tokens or math.inf
    elif run.train_tokens is not None:
        tokens_left = max(run.train_tokens - done.consumed_train_tokens, 0)
        samples = min(samples, consumed + math.ceil(tokens_left / config.data.seq_length))
    if not ramp:
        steps = max(
            min(iterations - count, math.ceil((samples - consumed) / batch) if samples < math.inf else math.inf), 0
        )
        return count + steps, consumed + steps * batch
    counted = done.consumed_train_tokens
    while consumed < samples and count < iterations and counted < tokens:
        batch_sizes.update(consumed, False)
        batch = batch_sizes.get_current_running_global_batch_size()
        consumed += batch
        count += 1
        counted += batch * length_in_step(config, count)
    batch_sizes.update(0, False)
    return count, consumed


def evaluations(config: Config, iterations: int) -> int:
    """The number of different parts of the validation data on which a run of ``iterations`` is evaluated."""
    return iterations // config.run.eval_interval + 1 if config.run.eval_interval else 1


def batches_for(job: Job, dataset: Dataset | None, consumed: int, workers: int) -> Any:
    """An iterator over micro-batches, or a list of one per virtual stage; None if this pipeline stage reads no data.

    Args:
        consumed: samples of the dataset to skip.
        workers: processes that read ahead.
    """
    config, runtime = job.config, job.runtime

    def iterator() -> Iterator[dict[str, torch.Tensor]] | None:
        if not runtime.reads_data or dataset is None:
            return None
        return micro_batches(
            dataset,
            consumed_samples=consumed,
            micro_batch_size=config.data.micro_batch_size,
            data_parallel_rank=runtime.grid.data.rank,
            data_parallel_size=runtime.grid.data.size,
            num_workers=workers,
            dataloader_type=config.data.dataloader_type,
            seed=config.run.seed,
            eod=job.eod if runtime.by_documents else None,
            numbers_only=not runtime.reads_tokens,
            plans=batch_plans(config, runtime),
            spans=None if runtime.by_documents else spans_to_read(runtime.layout, runtime.ahead),
        )

    return [iterator() for _ in job.model_chunks] if len(job.model_chunks) > 1 else iterator()


def spans_to_read(layout: SequenceLayout, ahead: int) -> Spans | None:
    """Positions of the tokens that this rank needs, its labels and those of multi-token prediction; None if all.

    Where documents matter, each rank needs all tokens instead, because the ends of documents are tokens.
    """
    read = union((start, stop + 1 + ahead) for start, stop in layout.local_spans)
    return None if layout.local_length == layout.seq_length else read


def describe(job: Job) -> Iterator[str]:
    """Lines about the job, for the console before training."""
    config, runtime = job.config, job.runtime
    sizes = [(p.numel(), p.requires_grad) for chunk in job.model_chunks for p in chunk.parameters()]
    parameters = f"{sum(size for size, _ in sizes):,} parameters"
    if config.model.lora_rank:
        parameters += f" ({sum(size for size, trained in sizes if trained):,} of them trained, LoRA)"
    yield f"{runtime.grid} on {dist.get_world_size()} x {runtime.platform.device_name()} ({dist.get_backend()})"
    yield (
        f"{config.data.seq_length} tokens per sample, {runtime.layout.local_length} per rank "
        f"({runtime.layout.balance}); attention kernel {config.attention.attention_kernel}, "
        f"layers {config.model.transformer_impl}"
    )
    if any(linear_layers(config.model)):
        yield f"linear-attention and SSM layers: kernel {config.attention.linear_attention_kernel}"
    yield from describe_layers(config)
    yield (
        f"{config.model.num_layers} layers, hidden size {config.model.hidden_size}, "
        f"{config.model.num_attention_heads} heads ({config.model.num_query_groups} for keys and values), vocabulary "
        f"{job.vocab_size}; {parameters} on rank 0; ZeRO {config.parallel.zero_stage}"
    )


@torch.no_grad()
def params_norm(job: Job) -> float:
    """L2 norm of all parameters of the model, each counted once. All ranks call it."""
    checkpoint.gather_parameters(job.model_chunks, job.config)
    total, partitioned = torch.zeros((2,), dtype=torch.float64, device=job.runtime.device).unbind()
    for chunk in job.model_chunks:
        for parameter in chunk.parameters():
            whole = getattr(parameter, "allreduce", True)
            group = get_tensor_model_parallel_group() if whole else get_expert_tensor_parallel_group()
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter, group):
                norm = total if whole else partitioned
                norm += to_local_if_dtensor(parameter).double().square().sum()
    dist.all_reduce(total, group=get_model_parallel_group())
    if job.config.parallel.zero_stage >= 2:
        dist.all_reduce(total, group=get_data_parallel_group(with_context_parallel=True))
        if job.config.model.num_experts:
            dist.all_reduce(partitioned, group=get_expert_data_parallel_group())
    if job.config.parallel.partition_position_embedding or job.config.model.num_experts:
        dist.all_reduce(partitioned, group=get_expert_tensor_model_pipeline_parallel_group())
    return float((total + partitioned).sqrt())
