# SPDX-License-Identifier: Apache-2.0
"""ZeRO 2 and 3 beyond grid invariance: bytes per rank, bf16, evaluation, norms of shards."""

import gc
from functools import partial

import pytest
import torch

from tests.distributed.flags import FULL, GQA, SP
from tests.distributed.training_runs import data_of, evaluated_loss, make_job, run_training, take_steps, train_job
from tests.pairs import also_in_full


def bytes_held(flags):
    """Bytes of weights, gradients and optimizer states between the backward pass and the update."""
    from megatron.core.utils import to_local_if_dtensor

    job = make_job(flags)
    results = []

    def count_and_prepare():
        inner = getattr(job.optimizer, "chained_optimizers", [job.optimizer])[0].optimizer
        tensors = [value for state in inner.state.values() for value in state.values()]
        for parameter in job.model_chunks[0].parameters():
            grads = (parameter.grad, getattr(parameter, "main_grad", None))
            tensors += [parameter, *(grad for grad in grads if grad is not None)]
        storages = {}
        for tensor in tensors:
            storage = to_local_if_dtensor(tensor).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        results.append(sum(storages.values()))
        return prepare()

    prepare, job.optimizer.prepare_grads = job.optimizer.prepare_grads, count_and_prepare
    train_job(job, 1)
    return results[0]


@pytest.mark.parametrize("flags", ["", *also_in_full(SP, FULL)])
@pytest.mark.lab
def test_a_rank_holds_its_share(pool, flags):
    whole = pool.run(bytes_held, 2 if flags == SP else 1, f"{GQA} {flags} --micro-batch-size 1")[0]
    for stage in (2, 3):
        world = 8 if flags == SP else 4
        for held in pool.run(bytes_held, world, f"{GQA} {flags} --micro-batch-size 1 --zero-stage {stage}"):
            assert held == pytest.approx(whole / 4, rel=0.01)


def peak_of_a_step(flags):
    from megatron.training.report.tensor_memory import PeakBytes, TensorMeter

    gc.collect()
    with TensorMeter() as meter:
        left = meter.now  # bytes that earlier jobs hold
    job = make_job(flags)
    meter = PeakBytes(job.runtime.device, resized=job.config.parallel.zero_stage >= 2)
    batches = data_of(job)
    with meter.step():
        take_steps(job, 1, batches)
    return meter.bytes - left


@pytest.mark.full
def test_the_metered_peak_falls_with_the_stage(pool):
    """Eight layers of 3 MB and hardly any activations: with Adam and gradients, 91 MB in all."""
    flags = f"{GQA} --hidden-size 256 --num-layers 8 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1"
    peaks = {stage: pool.run(peak_of_a_step, 4, f"{flags} --zero-stage {stage}")[0] for stage in (3, 2, 0)}
    assert peaks[3] < 0.4 * peaks[0]  # everything is split, except one or two gathered layers
    assert peaks[3] < 0.8 * peaks[2] < 0.5 * peaks[0]  # the weights are not split


@pytest.mark.parametrize("flags", ["--micro-batch-size 1 --grad-reduce-in-bf16", "", *also_in_full(FULL)])
@pytest.mark.usual(1)
def test_bf16_trains_as_with_zero_1(pool, long_runs, flags):
    """Weights and forward pass are the same to the last bit; bf16 gradients are summed in another order."""
    steps = 8 if long_runs else 3
    runs = {
        stage: pool.run(run_training, 2, f"{GQA} --bf16 --zero-stage {stage} {flags} --num-layers 2", True, steps)[0]
        for stage in (1, 2, 3)
    }
    losses, norms, _ = runs[1]
    for stage in (2, 3):
        mine, my_norms, _ = runs[stage]
        assert mine[0] == losses[0]
        assert mine == pytest.approx(losses, rel=2e-4)
        assert my_norms[0] == pytest.approx(norms[0], rel=1e-4 if "in-bf16" in flags else 1e-6)
    assert runs[2][:2] == runs[3][:2]


def fp16_run(flags, steps):
    """Losses, gradient norms and loss scales of each step."""
    job = make_job(f"{GQA} --num-layers 2 --micro-batch-size 1 --fp16 {flags}")
    runs, scales = [], []
    for _ in range(steps):
        scales.append(float(job.optimizer.get_loss_scale()))
        runs.append([part[0] for part in train_job(job, 1)[:2]])
    return runs, scales


@pytest.mark.parametrize(
    "scale",
    [
        "--initial-loss-scale 16384 --hysteresis 1",  # too large at first: steps are skipped
        *also_in_full("--initial-loss-scale 256 --loss-scale-window 3", "--loss-scale 256"),  # the first grows
    ],
)
def test_fp16_trains_as_with_zero_1(pool, long_runs, scale):
    """The same steps are skipped at the same scale."""
    steps = 8 if long_runs else 5
    runs = {stage: pool.run(fp16_run, 2, f"{scale} --zero-stage {stage}", steps)[0] for stage in (1, 2, 3)}
    expected, scales = runs[1]
    for stage in (2, 3):
        mine, my_scales = runs[stage]
        assert my_scales == scales
        assert [loss for loss, _ in mine] == pytest.approx([loss for loss, _ in expected], rel=2e-4)
        assert [norm for _, norm in mine] == pytest.approx([norm for _, norm in expected], rel=2e-3)
    skipped = [norm == 0 for _, norm in expected]
    assert any(skipped) == ("16384" in scale) and not all(skipped)


class RunAgain(torch.autograd.Function):
    """A part of a layer that keeps only its input and takes its weights as inputs, like chunked layers."""

    @staticmethod
    def forward(ctx, part, x, *weights):
        ctx.part = part
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return part(x)[0]

    @staticmethod
    def backward(ctx, grad):
        x, *weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.part(x)[0]
        return None, *torch.autograd.grad(out, (x, *weights), grad)


def run_again(mlp, part, x, **_):
    return RunAgain.apply(part, x, *mlp.parameters()), None


def run_with_parts_again(flags, steps):
    job = make_job(flags)
    for layer in job.model_chunks[0].module.decoder.layers:
        layer.mlp.forward = partial(run_again, layer.mlp, layer.mlp.forward)
    return train_job(job, steps)


@pytest.mark.parametrize("flags", ["--zero-stage 2", "--zero-stage 3", *also_in_full(f"--zero-stage 3 {FULL}")])
@pytest.mark.usual(0)
def test_parts_of_a_layer_may_run_again_in_its_backward_pass(pool, on_one_process, long_runs, flags):
    model, steps = f"{GQA} --num-layers 2 ", 5 if long_runs else 3
    losses, _, grads = on_one_process(model, True, steps)
    for mine, _, my_grads in pool.run(run_with_parts_again, 2, f"{model} --micro-batch-size 1 {flags}", steps):
        assert mine == pytest.approx(losses, rel=1e-5)
        for name, grad in grads.items():
            assert float((my_grads[name] - grad).abs().max() / grad.abs().max()) < 1e-5, name


def figures(flags):
    """Values of the log and of an evaluation in the middle of training, before and after it."""
    from megatron.training.job import params_norm

    job = make_job(f"{flags} --log-num-zeros-in-grad --eval-iters 1 --make-vocab-size-divisible-by 8")
    results = []
    for _ in range(2):
        (step,) = take_steps(job)
        results += [step.lm_loss, step.zeros_in_grad, params_norm(job), evaluated_loss(job, data_of(job, 1))]
    return results


@pytest.mark.parametrize(
    "flags, world",
    [
        ("--zero-stage 2", 2),
        ("--zero-stage 3 --ring-parallel-size 2", 2),
        *also_in_full((f"--zero-stage 3 {SP} --ring-parallel-size 2", 4)),
    ],
)
@pytest.mark.usual(0)
def test_figures_do_not_depend_on_shards(pool, flags, world):
    expected = pool.run(figures, 1, f"{GQA} --num-layers 2")[0]
    for mine in pool.run(figures, world, f"{GQA} --num-layers 2 {flags}"):
        assert mine == pytest.approx(expected, rel=1e-5)
