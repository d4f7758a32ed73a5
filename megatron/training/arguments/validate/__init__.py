# SPDX-License-Identifier: Apache-2.0
"""Completes a :class:`Config` and refuses what cannot run, before anything is built; a file for each subject.

Each refusal is one line that names the options and the way out. Kernels and data files are checked where they are
opened.
"""

from __future__ import annotations

import importlib.util
from copy import deepcopy
from dataclasses import fields
from math import gcd

from megatron.decisions.lengths import length_unit
from megatron.training.arguments.config import Config, ModelConfig
from megatron.training.arguments.dry_run import priced, processes
from megatron.training.arguments.idle import note_idle
from megatron.training.arguments.models import ROTARY, derive_shape
from megatron.training.arguments.stages import settle_virtual_stages
from megatron.training.arguments.validate.attention import check_attention, check_partitioned_positions
from megatron.training.arguments.validate.checkpoint import check_checkpoint, check_copies
from megatron.training.arguments.validate.chunks import check_chunks
from megatron.training.arguments.validate.data import check_data, check_lengths
from megatron.training.arguments.validate.evaluation import check_evaluation
from megatron.training.arguments.validate.faults import check_faults
from megatron.training.arguments.validate.job import (
    check_batch,
    check_duration,
    check_profile,
    check_recompute,
    check_schedule,
    check_zero,
    near,
)
from megatron.training.arguments.validate.ranges import check_ranges
from megatron.training.arguments.validate.tuning import check_lora, check_sft
from megatron.training.refusal import Gather, Refusal

__all__ = ["complete", "data_parallel_size", "transformer_engine_installed"]


def complete(config: Config, world_size: int) -> Config:
    """A copy of ``config`` with everything derived that the flags leave open; idempotent.

    Remarks for the user are added to ``config.notes``.

    Args:
        world_size: processes that were started; a dry run is completed for its own ``--world-size``.

    Raises:
        Refusal: the settings contradict each other or do not fit the processes.
    """
    config, world_size = deepcopy(config), processes(config, world_size)
    gather = Gather()
    gather.check("required", lambda: _required(config))
    gather.check("ranges", lambda: check_ranges(config), "required")
    shape = ("required", "ranges")
    gather.check("model", lambda: _model(config), *shape)
    gather.check("context", lambda: _context(config), "model")
    gather.check("sft", lambda: check_sft(config))
    gather.check("attention", lambda: check_attention(config), "model")
    gather.check("grid", lambda: _grid(config, world_size), "context")
    gather.check("heads", lambda: _heads(config), "context")
    gather.check("sequence", lambda: _sequence(config), "context", "attention")
    gather.check("pipeline", lambda: settle_virtual_stages(config), "model")
    gather.check("precision", lambda: _precision(config), *shape)
    gather.check("lora", lambda: check_lora(config), "model")
    gather.check("partition", lambda: check_partitioned_positions(config), "context", "attention")
    gather.check("recompute", lambda: check_recompute(config), "pipeline")
    gather.check("zero", lambda: check_zero(config), *shape)
    gather.check("chunks", lambda: check_chunks(config), "sequence", "recompute")
    gather.check("batch", lambda: check_batch(config, data_parallel_size(config, world_size)), "grid", "pipeline")
    gather.check("duration", lambda: check_duration(config), "batch")
    gather.check("lengths", lambda: check_lengths(config), "ranges", "attention")
    gather.check("evaluation", lambda: check_evaluation(config), "ranges", "attention", "sequence")
    gather.check("profile", lambda: check_profile(config))
    gather.check("schedule", lambda: check_schedule(config), "ranges", "duration")
    gather.check("data", lambda: check_data(config))
    gather.check("checkpoint", lambda: check_checkpoint(config), "ranges")
    gather.check("copies", lambda: check_copies(config, world_size), "ranges")
    gather.check("faults", lambda: check_faults(config, world_size), "grid", "zero", "checkpoint")
    gather.finish()
    note_idle(config)
    config.notes = list(dict.fromkeys(config.notes))
    return config


def data_parallel_size(config: Config, world_size: int) -> int:
    """Data-parallel ranks of a completed configuration."""
    parallel = config.parallel
    model = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return world_size // (model * (parallel.context_parallel_size or 1))


def transformer_engine_installed() -> bool:
    """Whether Transformer Engine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def _required(config: Config) -> None:
    model, data = config.model, config.data
    relative = model.position_embedding_type != "learned_absolute"  # nothing is as long as that, and it says no more
    if (model.model or relative) and model.max_position_embeddings is None:
        model.max_position_embeddings = data.seq_length
    names = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
    missing = [name for name in names if getattr(model, name) is None]
    missing += [name for name in ("seq_length", "micro_batch_size") if getattr(data, name) is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        shape = "" if model.model else "; --model names a whole shape, for example --model llama3-8b"
        raise Refusal(f"missing: {flags}{shape}")


def _model(config: Config) -> None:
    model, heads = config.model, config.model.num_attention_heads
    if model.kv_channels is None and model.hidden_size % heads:
        raise Refusal(
            f"--hidden-size {model.hidden_size} is no multiple of --num-attention-heads {heads}: "
            f"use {near(model.hidden_size, heads)}, or give --kv-channels"
        )
    groups = model.num_query_groups
    if not model.group_query_attention and groups not in (1, heads):
        raise Refusal(f"--num-query-groups {groups} needs --group-query-attention: add it, or leave both out")
    if model.group_query_attention and heads % groups:
        raise Refusal(
            f"--num-attention-heads {heads} is no multiple of --num-query-groups {groups}: "
            f"use --num-query-groups {gcd(heads, groups)}"
        )
    chosen = {"--swiglu": model.swiglu, "--squared-relu": model.squared_relu, "--openai-gelu": model.openai_gelu}
    activations = [flag for flag, given in chosen.items() if given]
    if len(activations) > 1:
        raise Refusal(f"{' and '.join(activations)} are {len(activations)} activations: leave one in")
    model = derive_shape(model)
    if model.ffn_hidden_size < 1:
        raise Refusal(
            f"--swiglu with --hidden-size {model.hidden_size} gives an MLP of width 0: give --ffn-hidden-size"
        )
    _positions(model)
    config.model = model


def _positions(model: ModelConfig) -> None:
    rotated, kind = int(model.kv_channels * model.rotary_percent), model.position_embedding_type
    if kind in ROTARY and (rotated < 2 or rotated % 2):
        raise Refusal(
            f"RoPE rotates pairs, and --rotary-percent {model.rotary_percent:g} of heads of {model.kv_channels} is "
            f"{rotated}: use another --rotary-percent or --kv-channels"
        )
    if kind != "yarn":
        names = [field.name for field in fields(model) if field.name.startswith("yarn_")]
        given = [name for name in names if getattr(model, name) != getattr(ModelConfig, name)]
        if given:
            flags = ", ".join("--" + name.replace("_", "-").replace("yarn-corr", "no-yarn-corr") for name in given)
            raise Refusal(f"{flags} without --position-embedding-type yarn: add it, or leave out what is YaRN's")
        return
    for flag in ("rotary_seq_len_interpolation_factor", "use_rope_scaling"):
        if getattr(model, flag):
            raise Refusal(
                f"--{flag.replace('_', '-')} and --position-embedding-type yarn both lower frequencies: leave one out"
            )
    if model.yarn_rotary_scaling_factor <= 1:
        raise Refusal(
            f"--position-embedding-type yarn with --yarn-rotary-scaling-factor {model.yarn_rotary_scaling_factor:g} "
            "changes nothing: give a factor above 1, or use --position-embedding-type rope"
        )
    if model.yarn_beta_fast <= model.yarn_beta_slow:
        raise Refusal(
            f"--yarn-beta-fast {model.yarn_beta_fast:g} must be above --yarn-beta-slow {model.yarn_beta_slow:g}: "
            "the defaults are 32 and 1"
        )
    if model.rotary_base < 2:
        raise Refusal(f"--rotary-base {model.rotary_base} leaves YaRN no slow pairs: use 2 or more")


def _context(config: Config) -> None:
    """Settle Ulysses x Ring = context parallel, from whichever of the three was given."""
    parallel, model = config.parallel, config.model
    total, ulysses, ring = parallel.context_parallel_size, parallel.ulysses_parallel_size, parallel.ring_parallel_size
    if sizes := parallel.hierarchical_context_parallel_sizes:
        if len(sizes) != 2 or ulysses not in (None, sizes[0]) or ring not in (None, sizes[1]):
            raise Refusal(
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} must be two sizes, Ulysses then "
                "Ring, and agree with --ulysses-parallel-size and --ring-parallel-size: give only one spelling"
            )
        ulysses, ring = sizes
    given = (ulysses or 1) * (ring or 1)
    if total == 1 and given > 1:  # Megatron-LM's default, spelled out in a script that the other flags were added to
        config.notes.append("--context-parallel-size 1 is read as not given: the sizes of Ulysses and Ring decide")
        total = None
    if parallel.cp_comm_type:
        ulysses, ring = _by_comm_type(config, total, ulysses, ring)
        if parallel.cp_comm_type != ["all_gather"]:
            parallel.cp_comm_type = None  # the sizes say it from here on
        given = (ulysses or 1) * (ring or 1)
    if total is not None and (total % given or (ulysses and ring and total != given)):
        sizes = {"--ulysses-parallel-size": ulysses, "--ring-parallel-size": ring}
        product = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size)
        relation = "not" if ulysses and ring else "no multiple of"
        raise Refusal(f"--context-parallel-size {total} is {relation} {product}: leave one out, or make them agree")
    if total is not None and ulysses is None and ring is None:
        ulysses = _choose_ulysses(total, config)
        if total > 1:
            config.notes.append(
                f"--context-parallel-size {total} is split into Ulysses {ulysses} x Ring {total // ulysses}, as far as "
                f"{model.num_attention_heads} query and {model.num_query_groups} key/value heads over TP "
                f"{parallel.tensor_model_parallel_size} go without copies; --ulysses-parallel-size decides otherwise"
            )
    if ulysses is None:
        ulysses = (total or ring or 1) // (ring or 1)
    if ring is None:
        ring = (total or ulysses) // ulysses
    parallel.ulysses_parallel_size, parallel.ring_parallel_size = ulysses, ring
    parallel.context_parallel_size = ulysses * ring


def _by_comm_type(config: Config, total: int | None, ulysses: int | None, ring: int | None) -> tuple:
    """Ulysses and Ring as --cp-comm-type names them; without --context-parallel-size it says nothing."""
    kinds = set(config.parallel.cp_comm_type)
    words = f"--cp-comm-type {' '.join(config.parallel.cp_comm_type)}"
    if unknown := kinds - {"p2p", "a2a", "a2a+p2p", "all_gather"}:
        raise Refusal(f"{words}: {sorted(unknown)[0]} is unknown; use p2p, a2a, a2a+p2p or all_gather")
    if len(kinds) > 1:
        raise Refusal(f"{words}: layers that share a sequence in different ways are not built here: give one word")
    (kind,) = kinds
    if kind == "all_gather" and (ring or total or 1) > 1:
        if config.chunks.fpdt:
            raise Refusal(f"{words} and --fpdt, whose keys travel chunk by chunk: use --cp-comm-type p2p")
        return (ulysses, ring) if ulysses or ring else (1, total)
    if total in (None, 1):
        config.notes.append(f"{words} says nothing without --context-parallel-size above 1")
        return ulysses, ring
    if kind == "a2a+p2p":
        if ulysses is None and ring is None:
            raise Refusal(f"{words} needs the sizes of both: add --hierarchical-context-parallel-sizes ULYSSES RING")
        return ulysses, ring
    wanted = (total, 1) if kind == "a2a" else (1, total)
    for flag, size, other in zip(("--ulysses-parallel-size", "--ring-parallel-size"), wanted, (ulysses, ring)):
        if other not in (None, size):
            raise Refusal(f"{words} with --context-parallel-size {total} is {flag} {size}, not {other}: leave one out")
    return wanted


def _choose_ulysses(total: int, config: Config) -> int:
    """The largest degree that divides ``total`` and a TP rank's query and key/value heads."""
    tensor = config.parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads // tensor
    kv_heads = max(config.model.num_query_groups // tensor, 1)
    return max(gcd(total, gcd(heads, kv_heads)), 1)


def _grid(config: Config, world_size: int) -> None:
    parallel = config.parallel
    sizes = {
        "--tensor-model-parallel-size": parallel.tensor_model_parallel_size,
        "--ulysses-parallel-size": parallel.ulysses_parallel_size,
        "--ring-parallel-size": parallel.ring_parallel_size,
        "--pipeline-model-parallel-size": parallel.pipeline_model_parallel_size,
    }
    ranks = 1
    for size in sizes.values():
        ranks *= size
    if world_size < 1 or world_size % ranks:
        grid = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        verb = "is larger than" if ranks > world_size else "does not divide"
        raise Refusal(
            f"{grid} = {ranks} ranks {verb} the {world_size} processes: start a multiple of {ranks}, or lower one"
        )


def _heads(config: Config) -> None:
    model, parallel = config.model, config.parallel
    heads, groups, tensor = model.num_attention_heads, model.num_query_groups, parallel.tensor_model_parallel_size
    if heads % tensor:
        raise Refusal(
            f"--num-attention-heads {heads} is no multiple of --tensor-model-parallel-size {tensor}: "
            f"use --tensor-model-parallel-size {gcd(heads, tensor)}"
        )
    if groups % tensor and tensor % groups:
        raise Refusal(
            f"--num-query-groups {groups} is neither multiple nor divisor of --tensor-model-parallel-size {tensor}: "
            f"use --tensor-model-parallel-size {gcd(heads, gcd(groups, tensor))}"
        )
    if model.ffn_hidden_size % tensor:
        raise Refusal(
            f"--ffn-hidden-size {model.ffn_hidden_size} is no multiple of --tensor-model-parallel-size {tensor}: "
            f"use {near(model.ffn_hidden_size, tensor)}"
        )
    ulysses, ring = parallel.ulysses_parallel_size, parallel.ring_parallel_size
    if (heads // tensor) % ulysses:
        fits = gcd(heads // tensor, ulysses)
        raise Refusal(
            f"--ulysses-parallel-size {ulysses} does not divide the {heads // tensor} query heads of a TP rank "
            f"(--num-attention-heads {heads}, TP {tensor}): use --ulysses-parallel-size {fits} "
            f"--ring-parallel-size {ring * ulysses // fits}"
        )


def _sequence(config: Config) -> None:
    model, parallel, length = config.model, config.parallel, config.data.seq_length
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        parallel.sequence_parallel = False
        config.notes.append(
            "--sequence-parallel has nothing to split with --tensor-model-parallel-size 1: switched off"
        )
    tensor = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    ulysses, ring, balance = (
        parallel.ulysses_parallel_size,
        parallel.ring_parallel_size,
        parallel.context_parallel_balance,
    )
    unit = length_unit(ulysses, ring, balance, tensor)
    if length % unit:
        split = f"Ulysses {ulysses} x Ring {ring} ({balance})" + (
            f" x TP {tensor} sequence-parallel" if tensor > 1 else ""
        )
        raise Refusal(
            f"--seq-length {length} cannot be cut over {split}: use a multiple of {unit}, {near(length, unit)}"
        )
    if model.max_position_embeddings < length:
        if model.position_embedding_type == "learned_absolute":
            raise Refusal(
                f"--max-position-embeddings {model.max_position_embeddings} is below --seq-length {length}, and "
                f"learned positions end there: use {length}, or --position-embedding-type rope"
            )
        config.notes.append(
            f"--seq-length {length} is beyond --max-position-embeddings {model.max_position_embeddings}, the length "
            "the model is made for"
        )


def _precision(config: Config) -> None:
    model, optimizer = config.model, config.optimizer
    if optimizer.bf16 and optimizer.fp16:
        raise Refusal("--bf16 and --fp16 are two precisions: leave one out")
    installed = transformer_engine_installed() or config.simulation.dry_run
    if model.transformer_impl == "transformer_engine" and not installed:
        raise Refusal(
            "--transformer-impl transformer_engine: Transformer Engine is not installed; install the [gpu] extra, or "
            "use --transformer-impl local"
        )
    if model.fp8_format and (model.transformer_impl == "local" or not installed):
        raise Refusal(
            f"--fp8-format {model.fp8_format} needs Transformer Engine: install the [gpu] extra and use "
            "--transformer-impl transformer_engine, or leave --fp8-format out"
        )
    if model.fp8_format:
        model.transformer_impl = "transformer_engine"
    if config.simulation.dry_run:
        config.notes += priced(config)
    if config.parallel.grad_reduce_in_bf16 and not optimizer.bf16:
        raise Refusal("--grad-reduce-in-bf16 needs --bf16: add it, or leave --grad-reduce-in-bf16 out")
