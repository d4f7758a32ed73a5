# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings in the training program: the same run on any grid, and the same model four million tokens later."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.layout.spans import Span
from megatron.context_parallel.positions.rope import LayoutRotaryEmbedding, rotary_angles
from tests.distributed.flags import FULL, P2, SP, STREAM, T2, V2, ZERO1, fpdt
from tests.distributed.test_training import GPT, GQA, MHA, check, cp
from tests.distributed.training_runs import (
    data_of,
    evaluated_loss,
    make_job,
    refusal_of,
    run_training,
    save_job,
    take_steps,
    train_job,
    weights_of,
)
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
            (4, f"{GQA} {LLAMA3}", f"{SP} {cp(1, 2)}"),
            (4, f"{MHA} {PART}", f"{SP} {cp(2, 1)} {fpdt(22)}"),
        ),
    ],
)
@pytest.mark.usual(0, 3)
def test_rope_does_not_depend_on_the_grid(pool, on_one_process, world, model, grid):
    check(pool, on_one_process, world, model, grid, llama=True, steps=3)


def test_gpt_with_yarn_does_not_depend_on_the_grid(pool, on_one_process):
    check(pool, on_one_process, 2, f"{GPT} {MHA} {YARN}", cp(1, 2), llama=False, steps=3)


def far_away(flags: str, start: int) -> tuple[Any, list[LayoutRotaryEmbedding]]:
    """A job whose first token has position ``start``, and the rotary embeddings of its layers."""
    from megatron.training.checkpoint.checkpoint import unwrap

    job = make_job(f"{GQA} --num-layers 2 --init-method-std 0.2 {flags}", True)
    chunk = unwrap(job.model_chunks[0])
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
@pytest.mark.usual(0)
def test_the_model_is_the_same_four_million_tokens_later(pool, world, grid):
    """RoPE depends on distances only. With positions times frequencies in fp32 the loss would change by 2e-4."""
    near, far = (pool.run(losses_from, world, start, grid)[0] for start in (0, FAR))
    assert far != near
    assert far == pytest.approx(near, rel=1e-6)


def worst_rounding(flags: str) -> float:
    """The largest error of a rotated query or key, in units of its last place, in a step at four million tokens."""
    job, rotaries = far_away(flags, FAR)
    rotary, worst = rotaries[0], []

    def rotate(*heads: Tensor) -> tuple[Tensor, Tensor]:
        *heads, angles = heads
        rotated = LayoutRotaryEmbedding.rotate(rotary, *heads, angles)
        assert angles.dtype == torch.float32 and rotary.inv_freq.dtype == torch.float64
        exact_angles = (rotary.layout.positions + FAR).double()[:, None, None, None] * rotary.inv_freq
        for x, out in zip(heads, rotated):
            assert x.dtype == out.dtype == torch.bfloat16
            z = torch.view_as_complex(torch.stack(x.detach().double().chunk(2, -1), -1)) * torch.exp(1j * exact_angles)
            exact = torch.cat((z.real, z.imag), -1)
            unit = torch.finfo(torch.bfloat16).eps * exact.abs().clamp(min=1e-4)
            worst.append(float(((out.double() - exact).abs() / unit).max()))
        return rotated

    rotary.rotate = rotate
    train_job(job, 1)
    assert worst
    return max(worst)


@pytest.mark.parametrize("world, grid", [(1, ""), (2, cp(1, 2)), (2, cp(2, 1))])
def test_in_bf16_queries_and_keys_at_four_million_are_rounded_once(pool, world, grid):
    """Angles are fp32 and so is the rotation: half a unit is the rounding of the result itself."""
    assert worst(pool.run(worst_rounding, world, f"--bf16 {grid}")) < 0.51


# --partition-position-embedding: the same run with a part of the table on each rank, saved as one table.


PARTITION = "--partition-position-embedding"
SMALL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --attention-dropout 0"
PARTITIONED_GPT = f"{SMALL} --hidden-dropout 0 --clip-grad 0.5"  # every step is clipped
UNTIED = "--untie-embeddings-and-output-weights"
SPARE = "--max-position-embeddings 77"  # of 64 tokens
DP2 = "--micro-batch-size 1"
DOCUMENTS = "--attention-mask document --micro-batch-size 1"

# (processes, model flags, grid and memory flags)
CASES = [
    (2, SPARE, f"{cp(1, 2)} {FULL}"),
    (2, DOCUMENTS, "--ring-parallel-size 2"),  # zigzag, not the balance "documents"
    (4, "", f"{T2} {cp(1, 2, 'contiguous')}"),
    (4, SPARE, f"{cp(1, 2)} {ZERO1} {DP2} --overlap-grad-reduce --overlap-param-gather"),
    (4, UNTIED, f"{P2} {cp(2, 1)}"),
    (2, SPARE, f"--zero-stage 2 {DP2} {fpdt(32, STREAM)}"),
    (2, UNTIED, f"--zero-stage 3 {cp(1, 2)}"),
]


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(0, 1, 5, 6)
def test_losses_gradients_and_norms_are_those_of_the_whole_table(pool, on_one_process, world, model, grid):
    check(
        pool,
        on_one_process,
        world,
        f"{PARTITIONED_GPT} {model}",
        f"{grid} {PARTITION}",
        llama=False,
        steps=2,
    )
    _, norms, _ = on_one_process(f"{PARTITIONED_GPT} {model} --num-layers 2 ", False)
    assert min(norms[:2]) > 0.5  # all of them are clipped


@pytest.mark.lab
def test_virtual_stages(pool, on_one_process):
    grid = f"{P2} {V2} {cp(1, 2)} {ZERO1} {PARTITION}"
    check(pool, on_one_process, 4, f"{PARTITIONED_GPT} --num-layers 4", grid, llama=False, steps=3)


@pytest.mark.parametrize(
    "world, grid",
    [(2, f"--zero-stage 3 {cp(2, 1)}"), *also_in_full((4, f"{P2} {cp(2, 1)}"), (4, f"{P2} {cp(1, 2)} {ZERO1}"))],
)
def test_bf16_is_that_of_the_whole_table_on_the_same_grid(pool, long_runs, world, grid):
    steps = 5 if long_runs else 3
    losses, norms, _ = pool.run(run_training, world, f"{PARTITIONED_GPT} --bf16 {grid}", False, steps)[0]
    mine, my_norms, _ = pool.run(run_training, world, f"{PARTITIONED_GPT} --bf16 {grid} {PARTITION}", False, steps)[0]
    assert mine[0] == losses[0]
    assert mine == pytest.approx(losses, rel=2e-4) and my_norms[0] == pytest.approx(norms[0], rel=1e-3)


def figures(flags):
    """(loss and gradient norm of a step, norm of the parameters, loss of an evaluation), zeros among the gradients."""
    from megatron.training.job import params_norm

    job = make_job(f"{flags} --log-num-zeros-in-grad --eval-iters 1 --make-vocab-size-divisible-by 8", False)
    (step,) = take_steps(job)
    return [step.lm_loss, step.grad_norm, params_norm(job), evaluated_loss(job, data_of(job, 1))], step.zeros_in_grad


@pytest.mark.parametrize(
    "world, grid",
    [
        (4, f"{SP} {cp(1, 2)} {ZERO1}"),
        *also_in_full((4, f"{T2} {cp(2, 1)}"), (4, f"--zero-stage 3 {cp(2, 1)}")),
    ],
)
def test_figures_count_each_row_once(pool, world, grid):
    expected, zeros = pool.run(figures, 1, f"{PARTITIONED_GPT} {SPARE}")[0]
    assert zeros > 13 * 32  # the spare rows, and a few more: sums that round to zero on one grid need not on another
    for mine, my_zeros in pool.run(figures, world, f"{PARTITIONED_GPT} {SPARE} {grid} {PARTITION}"):
        assert mine == pytest.approx(expected, rel=1e-5)
        assert abs(my_zeros - zeros) < 32  # less than a row


# ---- memory


def bytes_of_positions(flags):
    """(weights and gradients, optimizer states) of this rank's part of the table; its rows."""
    job = make_job(flags, False)
    train_job(job, 1)
    (weight,) = [weight for name, weight in job.model_chunks[0].named_parameters() if "position_embeddings" in name]
    buffers = [weight.main_grad.untyped_storage()] if hasattr(weight, "spans") else []
    states = [state for part in job.optimizer.chained_optimizers[1:] for state in part.optimizer.state.values()]
    tensors = [tensor for state in states for name, tensor in state.items() if name != "step"]
    return weight.nbytes, sum(buffer.nbytes() for buffer in buffers), sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("grid, states", [(f"{cp(2, 2)} {ZERO1} {DP2}", 1), *also_in_full((f"{SP} {cp(2, 2)}", 2))])
@pytest.mark.lab
def test_a_rank_holds_its_share(pool, grid, states):
    share = 1024 * 32 * 4 // (4 if "micro" in grid else 8)
    flags = (
        f"{PARTITIONED_GPT} --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 {grid} {PARTITION}"
    )
    for held in pool.run(bytes_of_positions, 8, flags, timeout=120):
        assert held == (share, share, states * share)


# ---- checkpoints


def table(job) -> torch.Tensor | None:
    """The complete table of positions, on the first pipeline stage."""
    from megatron.certifying.programs.whole_gradients import gather_by_position
    from megatron.training.model.weights import POSITIONS

    weight = weights_of(job).get(POSITIONS)
    if hasattr(weight, "spans"):
        return gather_by_position(weight.detach(), weight.spans)
    return None if weight is None else getattr(weight, "full_tensor", lambda: weight)().detach().clone()


def train_and_save(flags, folder, steps_before, steps_after):
    """Train, save and continue; returns losses and table after the save."""
    job = make_job(flags, False)
    train_job(job, steps_before)
    save_job(folder, job)
    saved = table(job)
    return train_job(job, steps_after)[0], saved, table(job)


def resume(flags, folder, steps):
    job = make_job(f"{flags} --load {folder}", False)
    loaded = table(job)
    return train_job(job, steps)[0], loaded, table(job)


GRIDS = {
    "whole": (1, ""),
    "whole, R 2, ZeRO 1": (2, f"{cp(1, 2)} {ZERO1}"),
    "whole, ZeRO 3": (2, "--zero-stage 3"),
    "R 2": (2, f"{cp(1, 2)} {PARTITION}"),
    "TP 2 sp, R 2, ZeRO 1": (4, f"{SP} {cp(1, 2)} {ZERO1} {PARTITION}"),
    "TP 2, U 2, ZeRO 1": (4, f"{T2} {cp(2, 1)} {ZERO1} {PARTITION}"),
    "PP 2, U 2, ZeRO 1": (4, f"{P2} {cp(2, 1)} {ZERO1} {PARTITION}"),
    "DP 2, R 2, ZeRO 1": (4, f"{cp(1, 2)} {ZERO1} {DP2} {PARTITION}"),
    "FPDT, TP 2 sp": (2, f"{SP} {fpdt(22)} {PARTITION}"),
    "FPDT, R 2": (2, f"{cp(1, 2)} {fpdt(32)} {PARTITION}"),
    "ZeRO 3, U 2": (2, f"--zero-stage 3 {cp(2, 1)} {PARTITION}"),
}
TRAINED = f"{SMALL} --hidden-dropout 0 {SPARE}"


@pytest.fixture(scope="module")
def saved(pool, shared, tmp_path_factory):
    """A grid's checkpoint after three steps, made once; its next two losses, and the table before and after them."""

    def run(name):
        (world, flags), folder = GRIDS[name], str(tmp_path_factory.mktemp("checkpoint"))
        return folder, *pool.run(train_and_save, world, f"{TRAINED} {flags}", folder, 3, 2, timeout=120)[0]

    return lambda name: shared(("saved with positions", name), lambda: run(name))


TRANSITIONS = [
    ("whole, ZeRO 3", "PP 2, U 2, ZeRO 1"),
    ("TP 2, U 2, ZeRO 1", "FPDT, R 2"),
    ("FPDT, R 2", "whole, ZeRO 3"),
    ("PP 2, U 2, ZeRO 1", "TP 2, U 2, ZeRO 1"),
]


@pytest.mark.parametrize("saved_on, loaded_on", [*TRANSITIONS, *also_in_full(*pairwise(GRIDS))])
@pytest.mark.usual(0, 2)
def test_any_grid_reads_what_another_wrote(pool, saved, saved_on, loaded_on):
    folder, losses, before, after = saved(saved_on)
    world, flags = GRIDS[loaded_on]
    mine, loaded, my_after = pool.run(resume, world, f"{TRAINED} {flags}", folder, 2, timeout=120)[0]
    assert torch.equal(loaded, before)
    assert mine == pytest.approx(losses, rel=1e-5)
    # These steps depend on Adam's states: without them the rows would differ.
    assert float((my_after - after).abs().max() / (after - before).abs().max()) < 1e-5
    assert float((my_after[64:] - before[64:]).abs().max()) > 0  # spare rows decay, also where they are split


def weights_only(flags, folder):
    job = make_job(f"{flags} --load {folder} --finetune", False)
    return job.progress.iteration, table(job)


@pytest.mark.parametrize("loaded_on", ["whole", "ZeRO 3, U 2"])
def test_finetune_takes_the_weights(pool, saved, loaded_on):
    folder, _, before, _ = saved("R 2")
    world, flags = GRIDS[loaded_on]
    first, loaded = pool.run(weights_only, world, f"{TRAINED} {flags}", folder)[0]
    assert first == 0 and torch.equal(loaded, before)


def test_another_number_of_positions_is_refused(pool, saved):
    flags = f"{TRAINED} {GRIDS['R 2'][1]} --max-position-embeddings 78 --load {saved('R 2')[0]}"
    for message in pool.run(refusal_of, 2, flags, False):
        assert "--max-position-embeddings 77 in the checkpoint, 78 in this run" in message
