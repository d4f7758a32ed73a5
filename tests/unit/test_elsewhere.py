# SPDX-License-Identifier: Apache-2.0
"""Flags of older Megatron-LM, Megatron-DeepSpeed, NeMo and Megatron-FSDP: what they become here."""

from __future__ import annotations

import pytest

from megatron.training.arguments.config import Config, ElsewhereConfig
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal

RUN = (
    "--num-layers 8 --hidden-size 96 --num-attention-heads 12 --seq-length 192 --max-position-embeddings 192 "
    "--micro-batch-size 1 --attention-dropout 0 --train-iters 20 --lr 1e-3 --mock-data"
)


def build(flags: str, world_size: int = 1) -> Config:
    config = parse(f"{RUN} {flags}".split(), world_size=world_size)
    assert config.elsewhere == ElsewhereConfig()
    return config


def same(theirs: str, ours: str, world_size: int = 1) -> Config:
    """Both command lines are one configuration, notes aside."""
    first, second = build(theirs, world_size), build(ours, world_size)
    first.notes = second.notes = []
    assert first == second
    return first


def refused(flags: str, *words: str, world_size: int = 1) -> None:
    with pytest.raises(Refusal) as caught:
        build(flags, world_size)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


FULL = "--recompute-granularity full --recompute-method"


# ---- recompute


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--checkpoint-activations", f"{FULL} uniform --recompute-num-layers 1"),
        ("--checkpoint-activations --checkpoint-num-layers 4", f"{FULL} uniform --recompute-num-layers 4"),
        ("--checkpoint-activations --deepspeed-activation-checkpointing", f"{FULL} uniform --recompute-num-layers 1"),
        ("--activations-checkpoint-method uniform", f"{FULL} uniform --recompute-num-layers 1"),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            f"{FULL} block --recompute-num-layers 3",
        ),
        (
            "--activations-checkpoint-granularity full --activations-checkpoint-method block "
            "--activations-checkpoint-num-layers 2",
            f"{FULL} block --recompute-num-layers 2",
        ),
        ("--activations-checkpoint-granularity selective", "--recompute-granularity selective"),
        ("--recompute-activations --recompute-modules core_attn", "--recompute-activations"),
        (
            "--checkpoint-activations --checkpoint-in-cpu",
            f"{FULL} uniform --recompute-num-layers 1 --offload-checkpoints",
        ),
        ("--fpdt --fpdt-chunk-size 64 --checkpoint-in-cpu", "--fpdt --fpdt-chunk-size 64 --offload-checkpoints"),
        (
            f"--checkpoint-activations {FULL} uniform --recompute-num-layers 2",
            f"{FULL} uniform --recompute-num-layers 2",
        ),
    ],
)
def test_recompute(theirs: str, ours: str):
    done = same(theirs, ours)
    assert done.attention.recompute_granularity is not None or done.chunks.fpdt


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--checkpoint-activations --activations-checkpoint-method block", ("--checkpoint-activations", "block")),
        ("--checkpoint-activations --recompute-granularity selective", ("--checkpoint-activations", "selective")),
        (f"--checkpoint-activations {FULL} block --recompute-num-layers 1", ("--checkpoint-activations", "block")),
        (
            f"--checkpoint-activations --checkpoint-num-layers 2 {FULL} uniform --recompute-num-layers 1",
            ("--checkpoint-num-layers 2", "--recompute-num-layers 1"),
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2 --activations-checkpoint-num-layers 3",
            ("--checkpoint-num-layers 2", "--activations-checkpoint-num-layers 3"),
        ),
        ("--checkpoint-activations --checkpoint-num-layers 0", ("--checkpoint-num-layers 0", "at least 1")),
        (
            "--activations-checkpoint-granularity selective --activations-checkpoint-method block",
            ("--activations-checkpoint-granularity selective", "block"),
        ),
        (
            "--activations-checkpoint-granularity full --recompute-granularity selective",
            ("--activations-checkpoint-granularity full", "--recompute-granularity selective"),
        ),
        ("--recompute-activations --checkpoint-activations", ("--recompute-activations", "full")),
    ],
)
def test_recompute_that_contradicts_itself(flags: str, words: tuple[str, ...]):
    refused(flags, *words)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--deepspeed-activation-checkpointing", "recomputes nothing by itself"),
        ("--checkpoint-num-layers 2", "--checkpoint-num-layers says nothing"),
        ("--checkpoint-in-cpu", "--checkpoint-in-cpu has nothing to move"),
        ("--recompute-modules mlp", "--recompute-modules says nothing"),
        ("--recompute-activations --recompute-modules core_attn layernorm", "core_attn layernorm: selective"),
    ],
)
def test_recompute_that_says_nothing_is_noted(flags: str, word: str):
    assert any(word in note for note in build(flags).notes)
