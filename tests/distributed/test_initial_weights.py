# SPDX-License-Identifier: Apache-2.0
"""Initial weights: their distributions are Megatron-LM's (of adapters, PEFT's), and only padding rows are zero."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.context_parallel.core.mixers.gated_delta_net import GatedDeltaNet
from megatron.context_parallel.core.mixers.mamba2 import Mamba2
from megatron.training.arguments.parser import parse
from megatron.training.model.weights import draw, draw_adapter, draw_rows
from tests.distributed.training_runs import make_job, take_steps, weights_of

CPU = torch.device("cpu")
SHAPE = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"
RUN = f"{SHAPE} --micro-batch-size 1 --global-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type"
RUN = f"{RUN} NullTokenizer --vocab-size 100 --seed 5"
NORMAL = "decoder.layers.3.self_attention.linear_qkv.weight"
OUTPUT = "decoder.layers.3.mlp.linear_fc2.weight"
SINKS = "decoder.layers.3.self_attention.core_attention.softmax_offset"
MIXER = "decoder.layers.3.self_attention"


def drawn(name: str, shape: tuple[int, ...], flags: str = "", hybrid: bool = False, own=None) -> torch.Tensor:
    config = parse(f"{RUN} {flags}".split())
    config.model.is_hybrid_model = hybrid
    core = SimpleNamespace(is_hybrid_model=hybrid, num_layers=8)
    return draw(name, shape, core, config, CPU, own=own)


def check_uniform(x: torch.Tensor, low: float, high: float) -> None:
    x = (x.double() - low) / (high - low)
    assert 0 <= x.min() < 0.002 and 0.998 < x.max() <= 1
    assert float(x.mean()) == pytest.approx(0.5, abs=0.01) and float(x.std()) == pytest.approx(12**-0.5, rel=0.02)


@pytest.mark.parametrize(
    "name, shape, flags, hybrid, std",
    [
        (NORMAL, (150, 200), "", False, 0.02),
        (NORMAL, (150, 200), "--init-method-std 0.5", False, 0.5),
        (OUTPUT, (150, 200), "", False, 0.02 / 4),  # sqrt(2 * 8 layers)
        (OUTPUT, (150, 200), "", True, 0.02 / 8**0.5),
        (SINKS, (30000,), "", False, 0.02),
        (SINKS, (30000,), "--init-method-xavier-uniform", False, 0.02),
    ],
)
def test_weights_are_normal(name, shape, flags, hybrid, std):
    x = drawn(name, shape, flags, hybrid)
    assert float(x.std()) == pytest.approx(std, rel=0.02) and float(x.mean()) == pytest.approx(0, abs=0.02 * std)
    assert 3.5 * std < float(x.abs().max()) < 6 * std


def test_weights_and_states_are_uniform():
    check_uniform(drawn(NORMAL, (100, 200), "--init-method-xavier-uniform"), -math.sqrt(6 / 300), math.sqrt(6 / 300))
    generator = torch.Generator().manual_seed(3)
    assert GatedDeltaNet.initial_bias(torch.empty(9), generator).eq(1).all()
    steps = torch.nn.functional.softplus(Mamba2.initial_bias(torch.empty(20000), generator).double())
    check_uniform(steps.log(), math.log(0.001), math.log(0.1))
    states = drawn(MIXER, (20000,), own=lambda values, generator: values.uniform_(2, 3, generator=generator))
    check_uniform(states, 2, 3)


LINEAR = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,1] --linear-num-key-heads 4 "
    "--linear-num-value-heads 16 --linear-key-head-dim 8 --linear-value-head-dim 8 --linear-conv-kernel-dim 9"
)
HYBRID = "--is-hybrid-model --hybrid-override-pattern MM --mamba-num-heads 16 --mamba-head-dim 8 --mamba-num-groups 4"


@pytest.mark.parametrize("layers, width", [(LINEAR, 9), (HYBRID, 4)], ids=["gated delta", "mamba2"])
def test_convolutions_and_decays(pool, layers, width):
    weights = pool.run(initial, 1, f"{layers} --num-layers 2 --normalization RMSNorm")[0]
    drawn = [x for name, x in weights.items() if "conv1d" in name]
    assert drawn and all(0.9 * width**-0.5 < x.abs().max() <= width**-0.5 for x in drawn)
    decays = torch.stack([x.exp() for name, x in weights.items() if name.endswith("A_log")])
    assert 1 <= decays.min() < 3 and 14 < decays.max() <= 16


def test_adapters_start_as_in_peft():
    config = parse(RUN.split())
    check_uniform(draw_adapter(f"{NORMAL}.lora_a", (50, 400), config, CPU), -1 / 20, 1 / 20)
    assert draw_adapter(f"{NORMAL}.lora_b", (50, 400), config, CPU).eq(0).all()


def test_blocks_of_rows_are_the_same_for_any_rank():
    config, core = parse(RUN.split()), SimpleNamespace(is_hybrid_model=False, num_layers=8)

    def rows(*spans: tuple[int, int]) -> torch.Tensor:
        part = torch.full((sum(stop - start for start, stop in spans), 3), torch.nan)
        draw_rows(part, spans, "embedding.position_embeddings.weight", (50, 3), core, config, at_once=8)
        return part

    whole = rows((0, 50))
    assert whole.isfinite().all() and len(whole.unique()) == whole.numel()
    for spans in ([(3, 5)], [(8, 16)], [(40, 50), (0, 9)], [(7, 9), (47, 50)]):
        assert torch.equal(rows(*spans), torch.cat([whole[start:stop] for start, stop in spans]))


def initial(flags: str) -> dict[str, torch.Tensor]:
    job = make_job(flags, llama=False)
    return {name: parameter.detach().clone() for name, parameter in weights_of(job).items()}


@pytest.mark.parametrize("divisible, padding", [(1, 0), (16, 2), (64, 18)])  # the vocabulary has 302 ids
def test_norms_biases_and_padding(pool, divisible, padding):
    weights = pool.run(initial, 1, f"--make-vocab-size-divisible-by {divisible}")[0]
    for name, x in weights.items():
        if x.dim() == 1:
            assert x.eq(1.0 if "norm" in name and name.endswith("weight") else 0.0).all(), name
        elif "word_embeddings" not in name:
            assert x.ne(0).all(), name
    rows = weights["embedding.word_embeddings.weight"].ne(0).any(1)
    assert rows[:302].all() and len(rows) == 302 + padding and not rows[302:].any()


def test_tp_ranks_hold_their_parts_of_the_same_weights(pool):
    whole = pool.run(initial, 1, "--make-vocab-size-divisible-by 64")[0]
    parts = pool.run(initial, 2, "--make-vocab-size-divisible-by 32 --tensor-model-parallel-size 2")
    split = set()
    for name, x in whole.items():
        first, second = (part[name] for part in parts)
        dim = next((dim for dim in range(x.dim()) if first.size(dim) != x.size(dim)), None)
        assert torch.equal(first if dim is None else torch.cat([first, second], dim), x), name
        split.add(dim)
    assert split == {None, 0, 1}


def skipped(flags: str) -> list[bool]:
    """Whether this rank skips steps in which rank 0, rank 1 or no rank has a gradient that is not finite."""
    import torch.distributed as dist

    job, answers = make_job(flags), []
    (part,) = getattr(job.optimizer, "chained_optimizers", [job.optimizer])
    for bad in (0, 1, 2):
        for parameter in part.get_parameters():
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().flatten()[:1].fill_(torch.inf if dist.get_rank() == bad else 1.0)
        answers.append(part.prepare_grads())
    return answers


def test_all_ranks_skip_a_step_if_one_has_a_gradient_that_is_not_finite(pool):
    flags = "--fp16 --initial-loss-scale 16 --zero-stage 3"
    assert pool.run(skipped, 2, flags) == [[True, True, False]] * 2


def judged_on_ranks() -> list[str]:
    import torch.distributed as dist

    from megatron.training.watch import Watch

    watch = Watch(parse(f"{RUN} --skip-bad-batches 1".split()))
    return [watch.judge(math.nan if dist.get_rank() in bad else 2.0, 1.0, CPU) for bad in ((), (0,), (1,), (0, 1))]


def test_no_rank_goes_on_alone_if_another_sees_a_bad_loss(pool):
    other = "the loss or the gradient norm of another rank is bad"
    assert pool.run(judged_on_ranks, 2) == [["", "the loss is nan", other, "the loss is nan"],
                                            ["", other, "the loss is nan", "the loss is nan"]]  # fmt: skip


def tokens_of_a_step(flags: str) -> int:
    job = make_job(flags)
    (done,) = take_steps(job)
    return done.tokens / job.config.data.global_batch_size / job.config.data.seq_length


@pytest.mark.parametrize(
    "flags", ["--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--ring-parallel-size 2"]
)
def test_each_token_is_counted_once(pool, flags):
    assert pool.run(tokens_of_a_step, 2, flags) == [1.0, 1.0]
