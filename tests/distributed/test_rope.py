# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings in the training program: the same run on any grid, and the same model four million tokens later."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, rotary_angles
from tests.distributed.test_fpdt import fpdt
from tests.distributed.test_training import GPT, GQA, MHA, P2, SP, T2, check, cp
from tests.distributed.training_runs import make_job, train_job
from tests.errors import worst
from tests.pairs import also_in_full

ROPE, FAR = "--position-embedding-type rope", 2**22
YARN = (
    "--position-embedding-type yarn --yarn-rotary-scaling-factor 8 --yarn-original-max-position-embeddings 8 "
    "--yarn-mscale 0.7 --yarn-mscale-all-dim 0.2 --no-yarn-correction-range-round-to-int --kv-channels 16"
)
LLAMA3 = f"{ROPE} --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32 --kv-channels 16"
PART = f"{ROPE} --rotary-percent 0.5 --rotary-interleaved"
LINEAR = f"{ROPE} --rotary-seq-len-interpolation-factor 2.5"


@pytest.mark.parametrize(
    "world, model, grid",
    [
        (2, f"{GQA} {YARN}", cp(2, 1)),
        (2, f"{GQA} {LLAMA3}", f"{cp(2, 1)} {fpdt(22, '--fpdt-stream-hidden')}"),
        (2, f"{MHA} {PART}", cp(1, 2)),
        (2, f"{GQA} {LINEAR}", f"{P2} --recompute-granularity selective"),
        *also_in_full(
            (2, f"{GQA} {YARN}", fpdt(13, "--offload-checkpoints")),
            (4, f"{GQA} {YARN}", f"{P2} {cp(1, 2)} {fpdt(22)}"),
            (4, f"{GQA} {LLAMA3}", f"{T2} {SP} {cp(1, 2)}"),
            (4, f"{MHA} {PART}", f"{T2} {SP} {cp(2, 1)} {fpdt(22)}"),
        ),
    ],
)
def test_rope_does_not_depend_on_the_grid(pool, on_one_process, world, model, grid):
    check(pool, on_one_process, world, model, grid, llama=True, steps=3)


def test_gpt_with_yarn_does_not_depend_on_the_grid(pool, on_one_process):
    check(pool, on_one_process, 2, f"{GPT} {MHA} {YARN}", cp(1, 2), llama=False, steps=3)


def far_away(flags: str, start: int) -> tuple[Any, list[LayoutRotaryEmbedding]]:
    """A job whose first token stands at position ``start``, and the rotary embeddings of its layers."""
    from megatron.training.checkpoint.checkpoint import unwrap

    job = make_job(f"{GQA} --num-layers 2 --init-method-std 0.2 {flags}", True)
    chunk = unwrap(job.chunks[0])
    rotaries = [
        layer.chunks.attention.rotary if "--fpdt" in flags else layer.self_attention.core_attention.settings.rotary
        for layer in chunk.decoder.layers
    ]
    for rotary in rotaries:
        later = rotary_angles(rotary.layout.positions + start, rotary.inv_freq)[:, None, None]
        rotary.angles = partial(lambda angles, _: angles, later)
        rotary.of_spans = partial(later_spans, rotary, start)
    return job, rotaries


def later_spans(rotary: LayoutRotaryEmbedding, start: int, spans: tuple[Span, ...], _: object) -> Tensor:
    return LayoutRotaryEmbedding.of_spans(rotary, tuple((first + start, stop + start) for first, stop in spans))


def losses_from(start: int, flags: str) -> list[float]:
    return train_job(far_away(flags, start)[0], 3)[0]


@pytest.mark.parametrize("world, grid", [(1, ""), (2, cp(1, 2)), (1, fpdt(16))])
def test_the_model_is_the_same_four_million_tokens_later(pool, world, grid):
    """RoPE sees distances alone. With positions times frequencies in fp32 the loss would move by 2e-4."""
    here, there = (pool.run(losses_from, world, start, grid)[0] for start in (0, FAR))
    assert there != here
    assert there == pytest.approx(here, rel=1e-6)


def worst_rounding(flags: str) -> float:
    """The largest error of a rotated query or key, in units of its last place, in a step at four million tokens."""
    job, rotaries = far_away(flags, FAR)
    rotary, worst = rotaries[0], []

    def rotate(*heads: Tensor) -> tuple[Tensor, Tensor]:
        *heads, angles = heads
        turned = LayoutRotaryEmbedding.rotate(rotary, *heads, angles)
        assert angles.dtype == torch.float32 and rotary.inv_freq.dtype == torch.float64
        turns = (rotary.layout.positions + FAR).double()[:, None, None, None] * rotary.inv_freq
        for x, out in zip(heads, turned):
            assert x.dtype == out.dtype == torch.bfloat16
            z = torch.view_as_complex(torch.stack(x.detach().double().chunk(2, -1), -1)) * torch.exp(1j * turns)
            exact = torch.cat((z.real, z.imag), -1)
            unit = torch.finfo(torch.bfloat16).eps * exact.abs().clamp(min=1e-4)
            worst.append(float(((out.double() - exact).abs() / unit).max()))
        return turned

    rotary.rotate = rotate
    train_job(job, 1)
    assert worst
    return max(worst)


@pytest.mark.parametrize("world, grid", [(1, ""), (2, cp(1, 2)), (2, cp(2, 1))])
def test_in_bf16_queries_and_keys_at_four_million_are_rounded_once(pool, world, grid):
    """Angles are fp32 and so is the rotation: half a unit is the rounding of the result itself."""
    assert worst(pool.run(worst_rounding, world, f"--bf16 {grid}")) < 0.51
