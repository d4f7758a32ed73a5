# SPDX-License-Identifier: Apache-2.0
"""No run of ours has the errors that Megatron-LM's issue 7452 lists: wrong numbers where parallelisms are combined.

docs/use/certify.md has the table of these findings. A run on a grid is compared with one process; the same run with
core's error must differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from megatron.training.settings.models import LLAMA_DEFAULTS
from tests.distributed.flags import RUN, SHAPE
from tests.distributed.training_runs import data_of, evaluated_loss, first_gradients, make_job, take_steps

MODEL = "--num-layers 2 --softmax-type learnable --qk-layernorm --eod-mask-loss --attention-kernel math"
TENSOR, RING, DATA = "--tensor-model-parallel-size 2", "--ring-parallel-size 2", ""


def run(flags: str, change: Callable[[Any], None] | None = None) -> dict[str, Any]:
    """Losses and norms of two steps, the gradients of the first, and two evaluations of two batches after it."""
    job = make_job(f"{MODEL} {flags}")
    if change is not None:
        change(job)
    for chunk in job.model_chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("softmax_offset"):  # larger, so that an error in them changes the norm
                parameter.register_hook(lambda gradient: 1000 * gradient)
    batches = data_of(job)
    with first_gradients(job) as gradients:
        steps = take_steps(job, 1, batches)
    evaluated = [evaluated_loss(job, batches, iterations=2) for _ in range(2)]
    steps += take_steps(job, 1, batches)
    numbers = [step.lm_loss for step in steps], evaluated, [step.grad_norm for step in steps]
    return {"losses": numbers[0], "evaluated": numbers[1], "norms": numbers[2], "gradients": gradients}


def without_mark(job: Any) -> None:
    """Finding 8, as core's DotProductAttention: sinks are not marked as split over TP."""
    for chunk in job.model_chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("softmax_offset"):
                parameter.tensor_model_parallel = False


def without_sum(job: Any) -> None:
    """The pattern of finding 11: gradients of a norm of heads that are split over TP are not summed."""
    for chunk in job.model_chunks:
        chunk.config.qk_layernorm = False


def by_local_counts(job: Any) -> None:
    """Finding 9: losses are divided by the tokens of this rank."""
    for chunk in job.model_chunks:
        chunk.config.calculate_per_token_loss = False


def differences(numbers: dict[str, Any], right: dict[str, Any]) -> set[str]:
    """Names of what differs by more than rounding; of gradients only the direction is compared."""
    result = set()
    for kind in ("losses", "evaluated", "norms"):
        if numbers[kind] != pytest.approx(right[kind], rel=2e-5):
            result.add(kind)
    for name, gradient in numbers["gradients"].items():
        both = [x.flatten().double() for x in (gradient, right["gradients"][name])]
        if both[0].shape == both[1].shape and F.cosine_similarity(*both, dim=0) < 0.9999:
            result.add(name.rpartition(".")[0].rpartition(".")[2])
    return result


@pytest.fixture(scope="module")
def alone(pool) -> dict[str, Any]:
    return pool.run(run, 1, "", timeout=120)[0]


@pytest.mark.parametrize(
    "grid, change, noticed",
    [
        (TENSOR, None, set()),
        (TENSOR, without_mark, {"norms"}),
        (TENSOR, without_sum, {"q_layernorm", "k_layernorm"}),
        (RING, None, set()),
        (RING, by_local_counts, {"norms", "linear_qkv"}),
        pytest.param(DATA, None, set(), marks=pytest.mark.full),
    ],
)
@pytest.mark.usual(1, 2)
def test_findings_8_9_11_and_12(pool, alone, grid: str, change: Callable | None, noticed: set[str]) -> None:
    """Sinks under TP, TP without sequence parallelism, and uneven labels, in training and evaluation."""
    assert len(set(alone["losses"])) == 2
    for numbers in pool.run(run, 2, grid, change, timeout=120):
        found = differences(numbers, alone)
        assert noticed <= found if noticed else not found, found


def smoothed(smoothing: float) -> tuple[float, float]:
    """Largest error of core's loss over TP, and of its gradient, against PyTorch on all logits."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    size, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    logits = torch.randn(5, 1, 8 * size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(5)[:, None] * 3 % (8 * size)
    mine = logits.detach().chunk(size, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, labels, smoothing)
    loss.sum().backward()
    vocabulary = 8 * size  # core gives the wrong words smoothing / (vocabulary - 1) each
    share = smoothing * vocabulary / (vocabulary - 1)
    right = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", label_smoothing=share)
    right.sum().backward()
    gradient = logits.grad.chunk(size, -1)[rank]
    return float((loss.flatten() - right).abs().max()), float((mine.grad - gradient).abs().max())


@pytest.mark.lab
def test_finding_1_is_in_core(pool) -> None:
    """Label smoothing averages over this rank's part of the vocabulary."""
    assert max(pool.run(smoothed, 1, 0.1)[0]) < 1e-5
    assert max(max(errors) for errors in pool.run(smoothed, 2, 0.0)) < 1e-5
    assert min(errors[0] for errors in pool.run(smoothed, 2, 0.1)) > 1e-3


@pytest.mark.parametrize(
    "finding, flags",
    [("appendix", "--num-experts 4 --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01"),
 (11, "--is-hybrid-model")],
)  # fmt: skip
def test_flags_that_would_reach_a_finding_are_refused(finding: int | str, flags: str) -> None:
    with pytest.raises(Refusal):
        parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA_DEFAULTS, 1)


def gathered_logits() -> list[bool]:
    """Finding 2: whether the model's last layer gathers logits, from which the loss would be wrong by log(TP)."""
    return [chunk.module.output_layer.gather_output for chunk in make_job(f"{MODEL} {TENSOR}").model_chunks]


def test_finding_2_logits_stay_split(pool) -> None:
    assert pool.run(gathered_logits, 2) == [[False], [False]]


def padding_masks() -> list[tuple[int, int]]:
    """Findings 5 and 10: (tokens, tokens of the padding mask) that each router of this rank gets."""
    from megatron.training.model.expert_load import routers

    flags = f"{TENSOR} --sequence-parallel --num-experts 4 --moe-ffn-hidden-size 32 --eod-mask-loss"
    job, seen = make_job(f"--num-layers 2 {flags}"), []
    for router in routers(job.model_chunks):
        router.register_forward_pre_hook(lambda _, args: seen.append((args[0].size(0), args[1].size(0))))
    evaluated_loss(job, count=1)
    return seen


def test_finding_5_the_mask_of_experts_is_cut_by_our_grid(pool) -> None:
    """``test_experts.py`` compares the numbers, under TP and with masked labels."""
    assert pool.run(padding_masks, 2, timeout=120) == [[(32, 32)] * 2] * 2
