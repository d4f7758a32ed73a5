# SPDX-License-Identifier: Apache-2.0
"""What changes in a run's command line at another sequence length: positions, batch, steps, and what a plan decides."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from megatron.simulator.changes_that_fit import SAME_CHOICE
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.explain import count
from megatron.simulator.planner.request import tokens
from megatron.training.arguments.argv import flat, options
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from tools.plan_options import on_nodes
from tools.script_edits import Changes

# Flags of a script that the plan replaces, in addition to `SAME_CHOICE`.
PLANNED = """--tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size --micro-batch-size
--expert-model-parallel-size --overlap-grad-reduce --overlap-param-gather --fpdt --fpdt-chunk-size --no-fpdt-offload
--fpdt-stream-hidden --offload-checkpoints --ffn-chunks --loss-chunks --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
--pipeline-model-parallel-layout --use-torch-fsdp2 --rampup-batch-size --tp-comm-overlap --fp16 --deepspeed
--step-batch-size-schedule --deepspeed_config --deepspeed-config --deepspeed-activation-checkpointing""".split()
PLANNED += " ".join(SAME_CHOICE).split()
ROPE = ("yarn", "base", "keep")


@dataclass(frozen=True)
class Target:
    """Where a run goes: to ``length`` tokens in a sample, on ``gpus``."""

    length: int
    batch: int
    gpus: int
    machine: Machine


@dataclass(frozen=True)
class Positions:
    """How a model's positions reach a length."""

    changes: Changes
    words: str
    stretched: bool = False  # the run starts from a checkpoint of the short one


def target_of(config: Config, args: argparse.Namespace) -> Target:
    """Where the options send a run. Raises Refusal."""
    length = tokens(args.seq_length, "--seq-length")
    if not config.data.seq_length:
        raise Refusal(f"{args.script}: its command has no --seq-length")
    gpus, machine = on_nodes(args.gpus, load(args.gpu))
    batch = max(1, (config.data.global_batch_size or 1) * config.data.seq_length // length)
    given = tokens(args.global_batch, "--global-batch") if args.global_batch else 0
    return Target(length, given or batch, gpus, machine)


def at_length(words: list[str], changes: Changes, config: Config) -> list[str]:
    """The command line with the changes for a length, and without what a plan decides."""
    if config.foreign.deepspeed_config:  # the file is left out, and may give this
        changes = changes | {"--clip-grad": [f"{config.optimizer.clip_grad:g}"]}
    kept = [option for option in options(words) if option[0] not in {*PLANNED, *changes}]
    return flat([*kept, *([flag, *values] for flag, values in changes.items() if values is not None)])


def with_plan(words: list[str], flags: list[str]) -> list[str]:
    """The command line with these flags in place of its own."""
    new = options(flags)
    kept = [option for option in options(words) if option[0] not in {flag for flag, *_ in new}]
    return flat([*kept, *new])


def positions_at(config: Config, length: int, rope: str) -> Positions:
    """How positions reach a length: ``rope`` is one of `ROPE`."""
    model, changes = config.model, {"--seq-length": [str(length)]}
    kind, trained = model.position_embedding_type, config.data.seq_length
    if model.max_position_embeddings:
        changes["--max-position-embeddings"] = [str(max(length, model.max_position_embeddings))]
        if model.use_rope_scaling:  # Llama 3.1's factor of 8 reaches 128K tokens
            trained = max(trained, int(16384 * model.rope_scaling_factor))
    if kind == "learned_absolute":
        return Positions(
            changes, f"Positions are learned: those beyond {trained:,} are new rows, so train from scratch."
        )
    if kind not in ("rope", "yarn"):
        return Positions(changes, f"Positions ({kind}) need no change.")
    if length <= trained or rope == "keep":
        why = "--rope keep" if rope == "keep" else f"they reach {count(trained)} tokens"
        return Positions(changes, f"Rotary positions stay as they are ({why}).")
    factor = length / config.data.seq_length
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    base = round(model.rotary_base * factor ** (head / (head - 2)))
    if kind == "yarn":
        more = f"{model.yarn_rotary_scaling_factor * factor:g}"
        changes["--yarn-rotary-scaling-factor"] = [more]
        words = f"YaRN's factor grows to {more}."
    elif model.use_rope_scaling:
        more = f"{model.rope_scaling_factor * length / trained:g}"
        changes["--rope-scaling-factor"] = [more]
        words = f"Llama 3.1's scaling of positions grows to a factor of {more}."
    elif rope == "base":
        changes["--rotary-base"] = [str(base)]
        words = f"RoPE's base grows from {model.rotary_base:,} to {base:,} (NTK-aware scaling)."
    else:
        changes |= {
            "--position-embedding-type": ["yarn"],
            "--use-rotary-position-embeddings": None,
            "--yarn-rotary-scaling-factor": [f"{factor:g}"],
            "--yarn-original-max-position-embeddings": [str(config.data.seq_length)],
        }
        longer = model.max_position_embeddings or 0
        reaches = f", or if the checkpoint knows {longer:,} positions, as the script says" if longer >= length else ""
        words = (
            f"Rotary positions: YaRN, factor {factor:g} from {count(config.data.seq_length)} tokens; --rope base gives "
            f"--rotary-base {base} in its place; from scratch{reaches}: --rope keep."
        )
    resume = "Start from the checkpoint of the short run with --load DIR --finetune and a new --save."
    return Positions(changes, f"{words} {resume}", stretched=True)


def batches(config: Config, target: Target) -> Changes:
    """Flags for as many tokens in a step and in the run as before."""
    changes: Changes = {"--global-batch-size": [str(target.batch)]}
    per_sample = config.data.seq_length / target.length
    per_step = (config.data.global_batch_size or 1) / target.batch * per_sample
    for unit, share in (("iters", per_step), ("samples", per_sample)):
        for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay"):
            value = getattr(config.part_with(f"{name}_{unit}"), f"{name}_{unit}")
            if value and share != 1:
                changes[f"--{name.replace('_', '-')}-{unit}"] = [str(max(1, round(value * share)))]
    return changes
