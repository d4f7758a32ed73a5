# SPDX-License-Identifier: Apache-2.0
"""One step of the real program on one simulated rank: its trace and its memory."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megatron.context_parallel.fpdt.chunked_loss import rows_with_loss
from megatron.context_parallel.layout.documents import passed_on
from megatron.context_parallel.sparse_attention.blocks_of_scores import one_by_one
from megatron.platform import Platform, cpu
from megatron.platform.hooks import replaced
from megatron.platform.simulated_cluster import fake_tensors, outside_fakes, simulated_world
from megatron.simulator.cost.trace import Trace
from megatron.simulator.dry_run.allocation.reserved import Allocations
from megatron.simulator.dry_run.call_replay import replayed_chunks
from megatron.simulator.dry_run.recording.fp8 import Fp8, held_by, use_fp8
from megatron.simulator.dry_run.recording.gpu_kernels import gpu_kernels, simulated_offload
from megatron.simulator.dry_run.recording.recorder import Recorder, axes_of
from megatron.simulator.dry_run.recording.routing import routing_of
from megatron.simulator.dry_run.replay import Repeat, Stretch, find_repeat, with_growth
from megatron.simulator.machines.machine import Machine
from megatron.training.arguments.data_paths import WITHOUT_FILES
from megatron.training.data.tokenizer import SENTENCEPIECE, build_tokenizer, check_vocab
from megatron.training.families.named import vocabulary
from megatron.training.refusal import Refusal
from megatron.training.report.memory_picture import DEVICE_KINDS, series
from megatron.training.report.memory_profile import Profile
from megatron.training.report.tensor_memory import History
from megatron.training.settings.config import Config

# --- the vocabulary size of a dry run ---

# Vocabulary sizes of published tokenizers, with added tokens, by a part of the name; the first match counts.
BY_NAME: tuple[tuple[str, int], ...] = (
    (r"llama-?3", 128256),
    (r"llama-?2|llama-?1|llama-\d+b|llama$|tinyllama|vicuna|alpaca", 32000),
    (r"mistral-nemo", 131072),
    (r"mi[sx]tral", 32000),
    (r"qwen-?3", 151669),
    (r"qwen-?2\.5", 151665),
    (r"qwen-?2", 151646),
    (r"gpt-?neox|pythia|mpt-", 50277),
    (r"gpt-?2|gpt-?j", 50257),
    (r"opt-\d", 50265),
    (r"falcon", 65024),
    (r"starcoder(?!2)", 49152),
    (r"bloom", 250680),
    (r"nemotron", 256000),
)
BY_TYPE = {"GPT2BPETokenizer": 50257, **dict.fromkeys(SENTENCEPIECE, 32000)}
LONGEST_TIKTOKEN = 2**17  # core's default limit on a tiktoken vocabulary


def vocabulary_of(config: Config) -> tuple[int, str | None]:
    """(vocabulary size of a dry run without padding, a line about the assumption if one was made).

    It reads the tokenizer if its files exist, as a run does. Otherwise the size is --vocab-size, --padded-vocab-size,
    or the size of a known tokenizer, which the name in --tokenizer-model, --model or --tokenizer-type identifies.

    Raises:
        Refusal: none of these gives the size, or the run would refuse the tokenizer.
    """
    model, kind = config.model, config.data.tokenizer_type
    if kind in WITHOUT_FILES or (kind and _files_are_there(config)):
        return check_vocab(model.vocab_size, build_tokenizer(config.data, model.vocab_size)), None
    absent = f"the files of --tokenizer-type {kind} do not exist" if kind else "no --tokenizer-type was given"
    if model.vocab_size:
        return model.vocab_size, f"{absent}: {model.vocab_size} tokens, from --vocab-size"
    if padded := model.padded_vocab_size:
        return padded, f"{absent}: {padded} tokens, from --padded-vocab-size"
    for name, size in _named(config):
        return size, f"{absent}: {size} tokens are assumed, as {name} has; --vocab-size N changes this"
    where = f" ({config.data.tokenizer_model})" if config.data.tokenizer_model else ""
    raise Refusal(f"--dry-run: {absent}{where}, and the vocabulary size is unknown: add --vocab-size N")


def _files_are_there(config: Config) -> bool:
    data = config.data
    if data.tokenizer_type == "GPT2BPETokenizer":
        return all(path and os.path.isfile(path) for path in (data.vocab_file, data.merge_file))
    exists = os.path.isdir if data.tokenizer_type == "HuggingFaceTokenizer" else os.path.isfile
    return bool(data.tokenizer_model) and exists(data.tokenizer_model)


def _named(config: Config) -> Iterator[tuple[str, int]]:
    """(name, vocabulary size) of the names in the flags, the most reliable first."""
    model, data = config.model.model, config.data
    text = re.sub(r"[\s_]", "-", (data.tokenizer_model or "").lower())
    for pattern, size in BY_NAME:
        for part in reversed(text.removesuffix(".model").removesuffix(".json").split("/")):
            if re.search(pattern, part):
                yield data.tokenizer_model, size
    if model:
        yield f"--model {model}", vocabulary(model)
    if data.tokenizer_type == "TikTokenizer":
        yield "the largest TikTokenizer", LONGEST_TIKTOKEN
    if data.tokenizer_type in BY_TYPE:
        yield ("GPT-2" if data.tokenizer_type == "GPT2BPETokenizer" else "Llama-2"), BY_TYPE[data.tokenizer_type]


@dataclass
class RankStep:
    """Trace and memory of one rank's step."""

    rank: int
    peaks: dict[str, dict[str, int]]  # peak device bytes in each phase (forward, backward, optimizer), by kind
    host_peak: int  # peak bytes of host memory
    trace: Trace
    profile: Profile = field(repr=False)  # the step's memory over time, as --profile-memory records it
    # the events of the trace that repeat for the micro-batches that did not run; None: all ran
    repeat: Repeat | None = None
    # (storage, change of its bytes) on the device in order, beginning with what existed before the step; and which of
    # these changes repeat
    allocations: Allocations = field(default_factory=lambda: Allocations([]), repr=False)

    @property
    def device_peak(self) -> int:
        return max(sum(kinds.values()) for kinds in self.peaks.values())


def run_rank(
    config: Config,
    world_size: int,
    rank: int,
    vocab_size: int,
    *,
    machine: Machine | None = None,
    stretch: Stretch | None = None,
    fp8: Fp8 | None = None,
    recorder: Callable[..., Recorder] = Recorder,
    fused_rope: bool = True,
    every_chunk: bool = False,
    also: AbstractContextManager | None = None,
) -> RankStep:
    """Run one training step as ``rank`` of ``world_size``, with fake tensors and a fake process group.

    Args:
        config: completed for ``world_size``; it is not changed.
        vocab_size: vocabulary size without padding.
        machine: simulate its GPU's kernels, streams and fused operations; None: those of a CPU.
        stretch: the micro-batches to run, and which of these repeat; None: run all.
        fp8: how tensors are stored under --fp8-format; default: as on GPUs before Blackwell.
        recorder: makes the recorder of the step.
        fused_rope: Triton's kernel rotates queries and keys; False: PyTorch's operations do.
        every_chunk: run all chunks of FPDT instead of replaying calls (call_replay.py).
        also: replaces some functions of the simulated GPU again.

    Raises:
        Refusal: a kernel or the grid is not available.
        Unsteady: the micro-batches of ``stretch`` do not repeat.
        ReplayMismatch: the calls of chunks do not repeat.
    """
    from megatron.training import loss, step
    from megatron.training.evaluation.reference_model import pair_objective
    from megatron.training.model.build import build_model
    from megatron.training.model.optimizer import build_optimizer, build_schedule, wrap_for_data_parallelism
    from megatron.training.report.memory_profile import MemoryProfile, owned
    from megatron.training.setup import start

    config = deepcopy(config)
    model = config.model
    fp8 = None if model.fp8_format is None else fp8 or held_by(model, None)
    model.transformer_impl, model.fp8_format = "local", None  # core's layers replace Transformer Engine's
    cpu.run_core_on_cpu()
    on_gpu = machine is not None
    platform = Platform("cuda" if on_gpu else "cpu", torch.device("cpu"), "fake", simulated=True)
    watch = recorder({}, resized=config.parallel.zero_stage >= 2, before=FakeTensor)
    kernels = gpu_kernels(watch, machine, fused_rope) if on_gpu else nullcontext()
    chunks_replayed = nullcontext() if every_chunk else replayed_chunks(watch)
    with simulated_world(world_size, rank), kernels, chunks_replayed, also or nullcontext():
        runtime = start(config, platform, simulated_offload(watch, on_gpu))
        watch.axes.update(axes_of(runtime.grid))
        data = config.data
        # Layers read the values of these tensors, which therefore are not fake.
        real = {"numbers": torch.arange(data.micro_batch_size)} if runtime.uses_dropout else {}
        if runtime.by_documents:  # each sample is one document, which needs the most work and memory
            real["document_ends"] = torch.full((data.micro_batch_size, 1), data.seq_length)
        routing = routing_of(config)
        with (
            fake_tensors(watch.waited, gloo=not on_gpu, selected=routing.selected if routing else None) as watch.answer,
            routing.numbers() if routing else nullcontext(),
            ExitStack() as ends,
        ):
            chunks = build_model(
                config, runtime.grid, runtime.layout, vocab_size, platform.device, runtime.offload, on_gpu=on_gpu
            )
            wrapped = wrap_for_data_parallelism(chunks, config)
            optimizer = build_optimizer(wrapped, config)
            schedule = build_schedule(optimizer, config)
            for chunk in wrapped:
                chunk.train()
                as_after_first_step(chunk)
            objective = pair_objective(config, runtime, wrapped, vocab_size, 0)
            weights = [*wrapped, *(objective.frozen if objective else ())]
            ends.callback(release_tensors, weights, optimizer)
            if fp8:
                use_fp8(wrapped, fp8, watch)
            batches = [_batches(config, real) if runtime.reads_data else None for _ in wrapped]
            gc.collect()
            for _, tensor in owned(weights, optimizer):  # in the order of the model, in which they are allocated
                watch.see(tensor)
            with ExitStack() as stack, watch:
                profile = MemoryProfile(watch, weights, optimizer)

                def mark(phase: str) -> None:
                    profile.mark(phase)
                    watch.mark(phase)

                stack.enter_context(replaced(passed_on, outside_fakes))
                stack.enter_context(replaced(one_by_one, lambda _: watch.one_for_all))
                stack.enter_context(replaced(rows_with_loss, lambda _: lambda wanted: torch.arange(len(wanted))))
                run = all_batches = micro_batches(config, runtime.grid.data.size)
                if stretch:
                    run = stretch.micro_batches
                    stack.enter_context(replaced(loss.mean_loss, lambda mean: with_all_reports(mean, run, all_batches)))
                step.train_step(
                    runtime,
                    wrapped,
                    optimizer,
                    schedule,
                    batches if len(wrapped) > 1 else batches[0],
                    config,
                    run,
                    mark,
                    objective=objective,
                )
                history = watch.history
                timeline = profile.finish()
            host_peak = max(watch.host_peak, runtime.offload.pool.peak if runtime.offload else 0)
            repeat, repeated = None, None
            if stretch:
                repeat = find_repeat(watch.trace, stretch)
                marks = [events for _, events, name in profile.phases if name == "forward"]
                repeated = marks[stretch.first], marks[stretch.first + stretch.passes], stretch.times
                begin, end = (mark - profile.first_event for mark in repeated[:2])
                timeline = with_growth(timeline, begin, end, stretch.times)
            changes = allocations(history, repeated)
        return RankStep(rank, peaks_by_phase(timeline), host_peak, watch.trace, timeline, repeat, changes)


def as_after_first_step(chunk: nn.Module) -> None:
    """Make DDP reduce gradients as soon as they exist, as after its first step.

    In the first step core only counts how often each gradient comes, and reduces all of them at the end
    (core/distributed/param_and_grad_buffer.py, ``is_first_batch``).
    """
    for group in (*getattr(chunk, "bucket_groups", ()), *getattr(chunk, "expert_parallel_bucket_groups", ())):
        group.is_first_batch = False
        group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)


def allocations(history: History, repeated: tuple[int, int, int] | None = None) -> Allocations:
    """Allocations on the device; ``repeated``: (begin, end, times) of events that repeat."""
    device = {block.number for block in history.blocks if block.place == "device"}
    kept = [bool(number in device and change) for _, number, change in history.events]
    changes = [(number, change) for keep, (_, number, change) in zip(kept, history.events) if keep]
    if repeated is None:
        return Allocations(changes)
    begin, end, times = repeated
    return Allocations(changes, sum(kept[:begin]), sum(kept[:end]), times)


def with_all_reports(mean_loss: Callable, run: int, all_batches: int) -> Callable:
    """``mean_loss`` with a report for each of ``all_batches`` micro-batches, of which only ``run`` ran."""

    def mean_loss_of_all(reports: list[Tensor], runtime: Any) -> Any:
        return mean_loss(reports + reports[-1:] * (all_batches - run), runtime)

    return mean_loss_of_all


def release_tensors(chunks: list[nn.Module], optimizer: Any) -> None:
    """Drop references to all tensors. Hooks of core's DDP make cycles through C++ that the garbage collector misses."""
    modules = [module for chunk in chunks for module in chunk.modules()]
    for module in modules:
        vars(module).clear()
    vars(optimizer).clear()


def micro_batches(config: Config, data_parallel: int) -> int:
    """Number of micro-batches of a rank in a step."""
    return config.data.global_batch_size // (config.data.micro_batch_size * data_parallel)


def peaks_by_phase(profile: Profile) -> dict[str, dict[str, int]]:
    """Peak device bytes in the forward, backward and optimizer phases, by kind."""
    times, sizes = series(profile)
    device = sizes[:, : len(DEVICE_KINDS)]
    totals = device.sum(axis=1)
    bounds = [*profile["phases"], ("end", float("inf"))]
    peaks: dict[str, dict[str, int]] = {}
    for (name, begin), (_, end) in zip(bounds, bounds[1:]):
        inside = ((times >= begin) & (times < end)).nonzero()[0]
        if not len(inside):
            continue
        fullest = inside[totals[inside].argmax()]
        if name not in peaks or totals[fullest] > sum(peaks[name].values()):
            peaks[name] = {kind: int(size) for kind, size in zip(DEVICE_KINDS, device[fullest])}
    return peaks


def _batches(config: Config, real: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    data = config.data
    shape = (data.micro_batch_size, data.seq_length)
    while True:
        batch = {name: torch.empty(shape, dtype=torch.int64) for name in ("tokens", "labels")}
        if config.pairs:
            batch["groups"] = torch.empty(shape, dtype=torch.int64)
        if config.model.reward_model:
            batch["margins"] = torch.empty(shape)
        yield {**batch, "loss_mask": torch.empty(shape), **real}
