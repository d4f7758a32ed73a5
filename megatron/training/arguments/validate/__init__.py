# SPDX-License-Identifier: Apache-2.0
"""Completes a :class:`Config` and refuses what cannot run, before anything is built.

Functions named complete_* change the configuration; functions named check_* only read it. Each refusal is one line
that names the flags and what to do. Kernels and data files are checked when they are opened.
"""

from __future__ import annotations

import importlib.util
from copy import deepcopy
from functools import partial

from megatron.training.arguments.dry_run_flags import notes_on_formulas, processes
from megatron.training.arguments.stages import complete_virtual_stages
from megatron.training.arguments.validate import (
    check_alone,
    check_data,
    check_grid,
    check_lora,
    check_memory,
    check_model,
    check_run,
)
from megatron.training.refusal import LEAVE_OUT, Fix, Gather, Refusal
from megatron.training.settings.config import Config
from megatron.training.settings.kinds import KINDS, mixers_of
from megatron.training.settings.models import outside_engine


def complete(config: Config, world_size: int) -> Config:
    """A copy of ``config`` in which all settings that the flags leave open are derived; idempotent.

    Remarks for the user are added to ``config.notes``.

    Args:
        world_size: number of processes that were started; a dry run is completed for its ``--world-size``.

    Raises:
        Refusal: the settings contradict each other or do not fit the processes.
    """
    config, world_size = deepcopy(config), processes(config, world_size)
    gather = Gather()
    check_run.complete_intervals(config)
    gather.check("required", lambda: check_model.complete_required(config))
    gather.check("ranges", lambda: check_alone.check_ranges(config), "required")
    shape = ("required", "ranges")
    gather.check("model", lambda: check_model.complete_model(config), *shape)
    for kind in KINDS:
        gather.check(kind.condition.text, partial(kind.complete, config), "model")
    gather.check("context", lambda: check_grid.complete_context(config), "model")
    gather.check("pairs", lambda: check_data.complete_pairs(config))
    gather.check("sft", lambda: check_data.complete_sft(config))
    gather.check("attention", lambda: check_model.complete_attention(config), "model")
    gather.check("grid", lambda: check_grid.check_grid(config, world_size), "context")
    gather.check("heads", lambda: check_grid.check_heads(config, world_size), "context")
    gather.check("sequence", lambda: check_grid.complete_sequence(config), "context", "attention")
    gather.check("pipeline", lambda: complete_virtual_stages(config), "model")
    gather.check("first layers", lambda: check_grid.check_first_layers(config), "pipeline", "grid")
    gather.check("precision", lambda: _complete_precision(config), *shape)
    for kind in KINDS:
        gather.check("kinds", partial(kind.check, config, world_size), kind.condition.text, "grid")
    gather.check("notes of kinds", lambda: _note_mixers(config), "kinds")
    gather.check("lora", lambda: check_lora.complete_lora(config), "kinds")
    gather.check("partition", lambda: check_model.complete_partitioned_positions(config), "context", "attention")
    gather.check("recompute", lambda: check_memory.complete_recompute(config), "pipeline")
    gather.check("zero", lambda: check_memory.complete_zero(config), *shape)
    gather.check("chunks", lambda: check_memory.complete_chunks(config), "sequence", "recompute")
    gather.check(
        "batch", lambda: check_grid.complete_batch(config, data_parallel_size(config, world_size)), "grid", "pipeline"
    )
    gather.check("duration", lambda: check_run.check_duration(config), "batch")
    gather.check("lengths", lambda: check_data.check_lengths(config), "ranges", "attention")
    gather.check("evaluation", lambda: check_data.complete_evaluation(config), "ranges", "attention", "sequence")
    gather.check("profile", lambda: check_memory.complete_profile(config, world_size))
    gather.check("schedule", lambda: check_run.complete_schedule(config), "ranges", "duration")
    gather.check("data", lambda: check_data.complete_data(config))
    gather.check("needs", lambda: check_alone.check_needs(config), "ranges")
    gather.check("checkpoint", lambda: check_run.complete_checkpoint(config), "needs")
    gather.check("copies", lambda: check_run.complete_copies(config, world_size), "ranges")
    gather.check("faults", lambda: check_run.check_faults(config, world_size), "grid", "zero", "checkpoint")
    gather.finish()
    check_alone.note_unused(config)
    config.notes = list(dict.fromkeys(config.notes))
    return config


def data_parallel_size(config: Config, world_size: int) -> int:
    """Number of data-parallel ranks of a completed configuration."""
    parallel = config.parallel
    model = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return world_size // (model * (parallel.context_parallel_size or 1))


def transformer_engine_installed() -> bool:
    """Whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def _note_mixers(config: Config) -> None:
    kinds = dict.fromkeys(mixers_of(config.model).values())
    config.notes += filter(None, (kind.note(config) for kind in kinds))


def _complete_precision(config: Config) -> None:
    model, optimizer = config.model, config.optimizer
    if optimizer.bf16 and optimizer.fp16:
        raise Refusal("--bf16 and --fp16", "are two precisions: leave one out")
    if model.transformer_impl == "transformer_engine" and not model.fp8_format and (flag := outside_engine(model)):
        model.transformer_impl = "local"
        config.notes.append(f"--transformer-impl local: layers of models with {flag} are core's own")
    installed = transformer_engine_installed() or config.simulation.dry_run
    if model.transformer_impl == "transformer_engine" and not installed:
        raise Refusal(
            "--transformer-impl transformer_engine",
            ": Transformer Engine is not installed; install the [gpu] extra, or use --transformer-impl local",
            Fix("--transformer-impl local"),
        )
    if model.fp8_format and (model.transformer_impl == "local" or not installed):
        raise Refusal(
            f"--fp8-format {model.fp8_format}",
            "needs Transformer Engine: install the [gpu] extra and use --transformer-impl "
            "transformer_engine, or leave --fp8-format out",
            LEAVE_OUT,
        )
    if model.fp8_format:
        model.transformer_impl = "transformer_engine"
    if config.simulation.dry_run:
        config.notes += notes_on_formulas(config)
    if config.parallel.grad_reduce_in_bf16 and not optimizer.bf16:
        raise Refusal(
            "--grad-reduce-in-bf16",
            "needs --bf16: add it, or leave --grad-reduce-in-bf16 out",
            Fix("--bf16"),
            LEAVE_OUT,
        )
