# SPDX-License-Identifier: Apache-2.0
"""Other programs' names for settings of ours, read into those settings.

Older Megatron-LM, Megatron-DeepSpeed, NeMo and Megatron-FSDP say in flags of their own what a combination of ours says.
Each is either expressed exactly, or refused where it contradicts a flag that was given too. Where the other program
would not have read it either, a note says so.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron.training.arguments.config import Config, ElsewhereConfig
from megatron.training.refusal import Refusal


def translate(config: Config, given: Collection[str]) -> None:
    """Read ``config.elsewhere`` into the settings proper and leave it empty; remarks go to ``config.notes``.

    Args:
        given: the settings that the command line gives, as "section.field": they win over nothing, but must agree.

    Raises:
        Refusal: two flags say different things about one setting.
    """
    express = _Express(config, given)
    _recompute(config, express)
    config.elsewhere = ElsewhereConfig()


class _Express:
    """Sets a setting, unless the command line says something else about it."""

    def __init__(self, config: Config, given: Collection[str]) -> None:
        self.config, self.given = config, given

    def __call__(self, name: str, value: Any, source: str) -> None:
        section, field = name.split(".")
        part = getattr(self.config, section)
        if name in self.given and (there := getattr(part, field)) != value:
            raise Refusal(f"{source} is {_words(field, value)}, and {_words(field, there)} is given: leave one out")
        setattr(part, field, value)

    def is_given(self, name: str) -> bool:
        return name in self.given


def _words(field: str, value: Any) -> str:
    flag = "--" + field.replace("_", "-")
    if value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


def _recompute(config: Config, express: _Express) -> None:
    """Megatron-LM 2.6 reads --checkpoint-activations as --activations-checkpoint-method uniform, and both as one layer
    a unit unless told otherwise."""
    other = config.elsewhere
    sources = {
        "--checkpoint-activations": "uniform" if other.checkpoint_activations else None,
        f"--activations-checkpoint-method {other.activations_checkpoint_method}": other.activations_checkpoint_method,
    }
    sources = {source: method for source, method in sources.items() if method}
    if len(set(sources.values())) > 1:
        raise Refusal(f"{' and '.join(sources)} recompute different layers: leave one out")
    granularity = other.activations_checkpoint_granularity
    if granularity == "selective" and sources:
        raise Refusal(
            f"--activations-checkpoint-granularity selective and {next(iter(sources))}, which is full: leave one out"
        )
    if granularity:
        express("attention.recompute_granularity", granularity, f"--activations-checkpoint-granularity {granularity}")
    counts = {
        "--checkpoint-num-layers": other.checkpoint_num_layers,
        "--activations-checkpoint-num-layers": other.activations_checkpoint_num_layers,
    }
    counts = {flag: count for flag, count in counts.items() if count is not None}
    for flag, count in counts.items():
        if count < 1:
            raise Refusal(f"{flag} {count} must be at least 1")
    if len(set(counts.values())) > 1:
        raise Refusal(f"{' and '.join(f'{flag} {count}' for flag, count in counts.items())} differ: leave one out")
    for source, method in sources.items():
        layers = next(iter(counts.values()), 1)
        express("attention.recompute_granularity", "full", source)
        express("attention.recompute_method", method, source)
        if counts or not express.is_given("attention.recompute_num_layers"):
            said = "".join(f" {flag} {count}" for flag, count in counts.items())
            express("attention.recompute_num_layers", layers, source + said)
    if counts and not sources:
        config.notes.append(
            f"{', '.join(counts)} says nothing without --checkpoint-activations or --activations-checkpoint-method"
        )
    if other.deepspeed_activation_checkpointing and not sources:
        config.notes.append(
            "--deepspeed-activation-checkpointing recomputes nothing by itself, as in Megatron-DeepSpeed: add "
            "--checkpoint-activations for less memory"
        )
    _selective(config)
    recomputed = config.attention.recompute_granularity == "full" or config.chunks.fpdt
    if other.checkpoint_in_cpu and recomputed:
        express("chunks.offload_checkpoints", True, "--checkpoint-in-cpu")
    elif other.checkpoint_in_cpu:
        config.notes.append("--checkpoint-in-cpu has nothing to move: no layers are recomputed")


def _selective(config: Config) -> None:
    modules = config.elsewhere.recompute_modules
    if not modules or set(modules) == {"core_attn"}:
        return
    attention = config.attention
    if attention.recompute_granularity != "selective" and not attention.recompute_activations:
        config.notes.append("--recompute-modules says nothing without --recompute-granularity selective")
    else:
        config.notes.append(
            f"--recompute-modules {' '.join(modules)}: selective recompute is of core_attn here, with the same result; "
            "--recompute-granularity full needs less memory"
        )
