# SPDX-License-Identifier: Apache-2.0
"""``--optimizer muon``: a written-out Muon, every grid against one process, and checkpoints between grids."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from megatron.training.model.updates import muon
from tests.distributed.flags import P2, R2, SP, U2
from tests.distributed.training_runs import make_job, refusal_of, resume, take_steps, train_and_save, train_job

MUON = "--optimizer muon --num-layers 2 --group-query-attention --num-query-groups 4 --clip-grad 0.5"
# AdamW divides rounding errors by a gradient's size where it is tiny, which is not Muon's matter.
ALIKE = "--lr 5e-4 --adam-eps 1e-6"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
STEPS = 10


def trained(flags, steps=STEPS):
    """The losses of some steps, and the weights after them."""
    from megatron.certifying.programs.whole_gradients import full_parameters

    job = make_job(f"{MUON} {ALIKE} {flags}")
    losses = train_job(job, steps)[0]
    return losses, full_parameters(job)


def largest_difference(results, losses, weights):
    """Of losses, and of weights relative to the largest entry of each, on all ranks together."""
    apart = [abs(a - b) / b for mine, _ in results for a, b in zip(mine, losses)]
    for _, mine in results:
        apart += [float((mine[name] - weights[name]).abs().max() / weights[name].abs().max()) for name in mine]
    assert set().union(*(mine for _, mine in results)) == set(weights)
    return max(apart)


@pytest.mark.usual(0, 4, 6)
@pytest.mark.parametrize(
    "world, grid, model",
    [
        (2, SP, "--muon-nesterov"),
        (2, U2, ""),
        (2, R2, ""),
        (4, f"{U2} {R2}", "--muon-no-split-qkv"),
        (2, "--zero-stage 1", "--muon-coefficient-type simple --muon-num-ns-steps 6"),
        (2, P2, "--muon-scale-mode unit_rms_norm --muon-extra-scale-factor 2"),
        (2, "--expert-model-parallel-size 2 --zero-stage 1", EXPERTS),
        (2, f"{R2} --fpdt --fpdt-chunk-size 16", ""),
        (2, f"{SP} --muon-tp-mode distributed", ""),
        (4, f"{SP} --zero-stage 1 --overlap-grad-reduce --overlap-param-gather", "--muon-nesterov"),
        (4, f"{SP} --expert-tensor-parallel-size 2 --zero-stage 1", EXPERTS),
        (2, "--zero-stage 3", ""),
        (8, "--tensor-model-parallel-size 4 --sequence-parallel --zero-stage 2", "--num-query-groups 2"),
        (4, f"{P2} --zero-stage 1 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1", "--num-layers 4"),
    ],
)
def test_a_grid_trains_like_one_process(pool, reference, world, grid, model):
    losses, weights = reference(trained, model)
    results = pool.run(trained, world, f"{model} {grid}", timeout=120)
    assert largest_difference(results, losses, weights) < 1e-5


def test_newton_schulz_on_the_part_of_a_rank_is_another_optimizer(pool, reference):
    losses, weights = reference(trained, "--muon-nesterov")
    results = pool.run(trained, 2, f"--muon-nesterov {SP} --muon-tp-mode blockwise")
    assert largest_difference(results, losses, weights) > 1e-2


def written_out(flags):
    """The largest difference between weights after some steps and those of a loop over the run's own gradients."""
    from megatron.certifying.programs.whole_gradients import full_gradients, full_parameters

    job = make_job(f"{MUON} --weight-decay 0.1 {flags}")
    weights = {name: weight.double() for name, weight in full_parameters(job).items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    prepare = job.optimizer.prepare_grads
    count, decay = 0, 0.8 if "--muon-momentum 0.8" in flags else 0.9

    def keep():
        nonlocal count
        skipped, count = prepare(), count + 1
        grads = {name: grad.double() for name, grad in full_gradients(job).items()}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        lr = job.optimizer.param_groups[0]["lr"]
        for name, grad in grads.items():
            grad = grad * min(1.0, 0.5 / (norm + 1e-6))
            weight, momentum = weights[name], momenta[name]
            if grad.dim() == 2 and "embedding" not in name and "output_layer" not in name:
                weight *= 1 - 0.1 * lr
                momentum.copy_(decay * momentum + (1 - decay) * grad)
                direction = decay * momentum + (1 - decay) * grad if "nesterov" in flags else momentum
                for rows in rows_of(name, len(grad)):
                    weight[rows] -= lr * orthogonal(direction[rows])
            else:
                weight *= 1 - (0.1 * lr if grad.dim() > 1 else 0)
                momentum.copy_(0.9 * momentum + 0.1 * grad)
                squares[name].copy_(0.999 * squares[name] + 0.001 * grad.square())
                root = (squares[name] / (1 - 0.999**count)).sqrt() + 1e-8
                weight -= lr * (momentum / (1 - 0.9**count)) / root
        return skipped

    job.optimizer.prepare_grads = keep
    take_steps(job, STEPS)
    return max(
        float((weight - weights[name]).abs().max() / weights[name].abs().max())
        for name, weight in full_parameters(job).items()
    )


def rows_of(name, rows):
    """4 groups of 2 heads of queries, keys and values, each with 8 rows a head; other weights are one matrix."""
    if not name.endswith("linear_qkv.weight"):
        return [list(range(rows))]
    place = [row % 32 for row in range(rows)]
    return [[row for row in range(rows) if low <= place[row] < high] for low, high in ((0, 16), (16, 24), (24, 32))]


def state_bytes(flags):
    """Bytes of this rank's states without AdamW's counters of steps, and those of the formula."""
    from megatron.formulas.parameters import rank_parameters, rank_states
    from megatron.training.arguments.stages import strategy_of
    from megatron.training.settings.models import model_shape

    job = make_job(f"{MUON} {flags}")
    strategy = strategy_of(job.config).but(data=job.runtime.grid.data.size)
    held = rank_parameters(model_shape(job.config.model, job.vocab_size), strategy, 0)
    every = [state for one in job.optimizer.optimizer.state.values() for state in one.items()]
    real = sum(getattr(value, "_local_tensor", value).nbytes for name, value in every if name != "step")
    return real, rank_states(held, strategy, 4).optimizer


@pytest.mark.usual(1)
@pytest.mark.parametrize("flags", ["", "--zero-stage 1", "--zero-stage 1 --overlap-grad-reduce", "--zero-stage 3"])
def test_matrices_have_one_state(pool, flags):
    results = pool.run(state_bytes, 2, flags)
    formula = results[0][1]
    assert 0 <= formula - max(real for real, _ in results) < 2048  # padding of the buffer
    assert formula < 0.8 * sum(pool.run(adam_bytes, 2, flags)) / 2


def adam_bytes(flags):
    return state_bytes(f"{flags} --optimizer adam")[1]


QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonal(x):
    """Five steps of the quintic iteration in the basis of singular vectors, where they are a function of numbers."""
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    values = values / x.norm()
    for a, b, c in QUINTIC:
        values = a * values + b * values**3 + c * values**5
    return left @ values.diag() @ right * math.sqrt(max(x.shape))


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize("kind", list(muon.COEFFICIENTS))
def test_singular_values_become_about_one(kind, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    result = muon.newton_schulz(x, muon.steps_of(kind, 10))
    values = left.T @ result @ right.T
    assert torch.allclose(values - values.diag().diag(), torch.zeros_like(values), atol=1e-4)
    assert 0.6 < float(values.diag().min()) and float(values.diag().max()) < 1.3


@pytest.mark.usual(1)
@pytest.mark.parametrize("flags", ["", "--muon-nesterov --muon-momentum 0.8"])
def test_the_update_is_muons(pool, flags):
    assert pool.run(written_out, 1, flags)[0] < 1e-5


@pytest.mark.usual(0)
@pytest.mark.parametrize(
    "writers, before, readers, after",
    [
        (2, "--zero-stage 1", 2, f"{SP} --zero-stage 0"),
        (2, f"{SP}", 4, f"{U2} --zero-stage 1"),
        (4, f"{P2} --zero-stage 1", 2, "--zero-stage 3"),
        (2, "--zero-stage 3", 1, ""),
    ],
)
def test_a_run_continues_on_another_grid(pool, tmp_path, writers, before, readers, after):
    folder, before = str(tmp_path), f"{MUON} {before}"
    _, undisturbed = pool.run(train_and_save, writers, before, folder, 3, 3, timeout=120)[0]
    assert pool.run(resume, writers, before, folder, 3, timeout=120)[0][1] == undisturbed
    for _, losses in pool.run(resume, readers, f"{MUON} {after}", folder, 3, timeout=120):
        assert losses == pytest.approx(undisturbed, rel=1e-5)


def test_the_states_of_muon_are_not_adams(pool, tmp_path):
    pool.run(train_and_save, 1, MUON, str(tmp_path), 1, 0)
    flags = f"--num-layers 2 --group-query-attention --num-query-groups 4 --load {tmp_path}"
    words = "has the states of --optimizer muon: use it, or pass --no-load-optim"
    assert words in pool.run(refusal_of, 1, flags)[0]


def test_half_precision_and_its_default(pool):
    """Steps in bf16 are about those in fp32, and are the default for bf16."""
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    settings = {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 1.0, "muon_coefficient_type": "quintic"}
    settings |= {"muon_num_ns_steps": 5, "muon_tp_mode": "duplicated", "fp16": False}
    matrix = muon.Matrix((24, 40), None, None)
    by_default, narrow, wide, exact = (
        muon.orthogonalized(x, matrix, SimpleNamespace(**settings, bf16=bf16, muon_fp32_matmul_prec=precision))
        for bf16, precision in ((True, None), (False, "medium"), (False, None), (True, "highest"))
    )
    assert torch.equal(by_default, narrow) and torch.equal(wide, exact)
    assert 0 < float((narrow - wide).abs().max() / wide.abs().max()) < 0.05
    assert torch.allclose(wide.double(), orthogonal(x.double()), atol=1e-3)
