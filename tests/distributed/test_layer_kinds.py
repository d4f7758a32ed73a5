# SPDX-License-Identifier: Apache-2.0
"""What holds for every kind of layer: in fp64, in the formulas of memory, in checkpoints, in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import test_experts as experts
from tests.distributed import test_gated_delta_net as states
from tests.distributed import test_latent_attention as latents
from tests.distributed import test_later_tokens as later
from tests.distributed import test_mamba2 as mamba2
from tests.distributed import test_state_adapters as adapters
from tests.distributed.flags import A2A, ETP1, LLAMA, P2, RUN, SHAPE, SP, T2, ZERO1, ZERO2, ZERO3, cp, ep
from tests.distributed.training_runs import data_of, evaluated_loss, make_job, resume, train_and_save, wrong_by
from tests.pairs import also_in_full

SENT = latents.SENT


def layer_in_fp64(flags: str) -> dict[str, torch.Tensor]:
    """Output and gradients (input and weights) of the first layer's attention or mixer, complete on each rank."""
    from megatron.certifying.programs.whole_gradients import gather_over_tensor_parallel
    from megatron.training.arguments.parser import parse
    from megatron.training.model.build import build_model
    from megatron.training.model.weights import sections
    from megatron.training.setup import start

    config = parse(f"{SHAPE} {RUN} {flags}".split(), LLAMA, dist.get_world_size())
    runtime = start(config)
    grid, layout = runtime.grid, runtime.layout
    (chunk,) = build_model(config, grid, layout, 301, runtime.device)
    layer = chunk.decoder.layers[0].self_attention.double()
    if hasattr(layer, "A_log"):
        layer.A_log.data -= 4  # states that last
    torch.manual_seed(7)
    whole = torch.randn(2, layout.seq_length, 2, 64, dtype=torch.float64)
    tensor, split = grid.tensor, config.parallel.sequence_parallel
    mine = layout.shard(whole, 1)
    mine = mine.chunk(tensor.size, 1)[tensor.rank] if split else mine
    x, dout = mine[0].clone().requires_grad_(), mine[1]
    out, _ = layer(x, None)
    (out * dout).sum().backward()

    def all_tokens(part: torch.Tensor) -> torch.Tensor:
        if split:
            parts = [torch.empty_like(part) for _ in range(tensor.size)]
            dist.all_gather(parts, part.contiguous(), group=tensor.group)
            part = torch.cat(parts)
        return layout.gather(part, 0)

    result = {"out": all_tokens(out.detach()), "dx": all_tokens(x.grad)}
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        if grid.context.size > 1:
            dist.all_reduce(grad, group=grid.context.group)
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(grad, group=tensor.group)
        if getattr(parameter, "tensor_model_parallel", False):
            grad = gather_over_tensor_parallel(grad, parameter.partition_dim, sections(parameter), tensor)
        result[name] = grad
    return result


# By kind: the model, the number of its results, and the grids.
IN_FP64 = {
    "states": (states.SHORT, 8, [(2, cp(2, 1)), (2, cp(1, 2)), (2, T2), (4, f"{SP} {cp(1, 2)}"), (4, cp(2, 2))]),
    "mamba2": (mamba2.SHORT, 10, [(2, cp(2, 1)), (4, f"{SP} {cp(1, 2)}"), (4, cp(2, 2))]),
    "latents": (latents.YARN, 9, [
        (2, cp(2, 1)), (2, cp(1, 2)), (2, T2), (4, f"{SP} {cp(1, 2)}"), (4, cp(2, 2)),
        (1, SENT), (2, f"{cp(2, 1)} {SENT}"), (4, f"{cp(1, 4)} {SENT}"), (4, f"{cp(2, 2)} {SENT}"),
        (4, f"{T2} {cp(1, 2)} {SENT} --context-parallel-balance contiguous"),
        (4, f"{SP} {cp(1, 2)} {SENT} --cp-comm-type all_gather"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("kind, world, grid", [(kind, *one) for kind, (*_, grids) in IN_FP64.items() for one in grids])
def test_a_layer_in_fp64(pool, reference, kind, world, grid):
    model, count, _ = IN_FP64[kind]
    expected = reference(layer_in_fp64, model)
    assert len(expected) == count
    for mine in pool.run(layer_in_fp64, world, f"{model} {grid}", timeout=120):
        for name in expected:
            assert wrong_by(mine, expected, name) < 1e-10, name


def held_here(flags: str) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Bytes of (parameters, gradients, states of the optimizer) of this rank, and by the formula."""
    from megatron.core.parallel_state import get_data_parallel_group, get_expert_data_parallel_group

    from megatron.formulas.parameters import model_states, stage_parameters
    from megatron.training.settings.models import model_shape

    job = make_job(flags)
    parallel, grid, (chunk,) = job.config.parallel, job.runtime.grid, job.model_chunks
    buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
    if parallel.zero_stage == 1:
        weights = sum(buffer.param_data.nbytes for buffer in buffers)
    else:
        weights = sum(parameter.nbytes for parameter in chunk.parameters())
    states = [
        value
        for part in getattr(job.optimizer, "chained_optimizers", [job.optimizer])
        for state in part.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    held = stage_parameters(
        model_shape(job.config.model, job.vocab_size),
        grid.tensor.size,
        grid.pipeline.size,
        grid.pipeline.rank,
        expert=parallel.expert_model_parallel_size,
        expert_tensor=parallel.expert_tensor_parallel_size,
    )
    ranks, expert_ranks = (
        get_data_parallel_group(with_context_parallel=True).size(),
        get_expert_data_parallel_group().size(),
    )
    formula = model_states(held, parallel.zero_stage, ranks, 4, bucketed=False, expert_ranks=expert_ranks)
    real = (weights, sum(buffer.grad_data.nbytes for buffer in buffers), sum(state.nbytes for state in states))
    return real, (formula.parameters, formula.gradients, formula.optimizer)


@pytest.mark.parametrize(
    "world, flags",
    [
        (1, f"{experts.PRE} --moe-layer-freq 2"), (4, f"{experts.MIXTRAL} {SP} {cp(2, 1)} {ETP1} {ep(2)}"),
        (4, f"{experts.PRE} {cp(2, 1)} {ep(2)} {ZERO1}"), (2, f"{experts.DEEPSEEK} {P2}"),
        (1, latents.MLA), (1, latents.PLAIN), (4, f"{latents.MLA} {SP} {cp(2, 1)}"), (2, f"{latents.EXPERTS} {P2}"),
        (2, f"{mamba2.HYBRID} {SP}"), (2, f"{mamba2.EXPERTS} {P2}"), *also_in_full((2, f"{mamba2.HYBRID} {P2}")),
    ],
)  # fmt: skip
def test_bytes_of_weights_and_states_are_those_of_the_formula(pool, world, flags):
    for real, formula in pool.run(held_here, world, flags, timeout=120):
        assert real[:2] == formula[:2]
        # With ZeRO 1 the formula counts a share of the buffers, which are padded; the states are not.
        assert real[2] <= formula[2] == pytest.approx(real[2], rel=2e-3 if ZERO1 in flags else 0)


MOE, MIXTRAL, ADAPTED = experts.DEEPSEEK, experts.MIXTRAL, experts.ADAPTED
UNEVEN = states.UNEVEN


@pytest.mark.parametrize(
    "model, saved, loaded",
    [
        (MOE, (2, f"{cp(2, 1)} {ep(2)} {ZERO1}"), (4, f"{SP} {P2} {ETP1} {ep(2)} {A2A}")),
        (MOE, (4, f"{cp(1, 2)} {ep(2)} {ZERO3}"), (2, f"{cp(2, 1)} {A2A} {ZERO2}")),
        (states.SHORT, (4, f"{SP} {cp(1, 2)} {ZERO1}"), (2, f"{P2} {UNEVEN}")),
        (states.SHORT, (2, ZERO3), (2, T2)),
        (mamba2.HYBRID, (4, f"{SP} {cp(1, 2)} {ZERO1}"), (2, P2)),
        (latents.EXPERTS, (2, f"{cp(2, 1)} {ZERO1}"), (4, f"{SP} {P2}")),
        (later.MTP, (2, f"{cp(1, 2)} {ZERO1}"), (4, f"{SP} {P2}")),
        (adapters.DELTA, (4, f"{SP} {cp(1, 2)} {ZERO1}"), (2, f"{P2} {UNEVEN}")),
        (adapters.LAST, (2, P2), (2, f"{P2} {ZERO1}")),
        *also_in_full(
            (MIXTRAL, (4, f"{SP} {cp(1, 2)} {ep(2)}"), (2, f"{ep(2)} {ZERO1}")),
            (MIXTRAL, (1, ""), (4, f"{SP} {cp(2, 1)} {ETP1} {ep(4)} {ZERO1}")),
            (MOE, (4, f"{P2} {ep(2)} {ZERO1}"), (1, "")),
            (ADAPTED, (4, f"{cp(2, 1)} {ep(4)} {ZERO1}"), (2, f"{ep(2)} {ZERO3}")),
            (MOE, (2, f"{ep(2)} {ZERO1}"), (4, f"{SP} {ep(2)} {ZERO3}")),
            (MOE, (4, f"{cp(2, 1)} {ep(4)} {ZERO2}"), (2, f"{SP} {ETP1} {A2A}")),
            (states.EXPERTS, (2, ep(2)), (4, f"{SP} {cp(2, 1)}")),
            (later.DEEPSEEK, (4, f"{cp(1, 2)} {ep(4)} {ZERO3}"), (4, f"{SP} {P2}")),
            (adapters.MAMBA, (2, f"{cp(2, 1)} {ZERO3}"), (2, f"{T2} {ZERO1}")),
        ),
    ],
)  # fmt: skip
@pytest.mark.usual(1, 2, 8)
def test_a_checkpoint_is_read_on_another_grid(pool, tmp_path, model, saved, loaded):
    _, after = pool.run(train_and_save, saved[0], f"{model} {saved[1]}", str(tmp_path), timeout=120)[0]
    for first, losses in pool.run(resume, loaded[0], f"{model} {loaded[1]}", str(tmp_path), timeout=120):
        assert first == 2 and losses == pytest.approx(after, rel=1e-5)


def evaluated_batch(flags: str, folder: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a checkpoint on one micro-batch, and that batch."""
    job = make_job(f"{flags} --load {folder}")
    return evaluated_loss(job, count=1), next(data_of(job))


def loss_in_transformers(folder: Path, batch: dict[str, torch.Tensor]) -> float:
    """The loss of the model in a Hugging Face folder on a micro-batch."""
    from transformers import AutoModelForCausalLM

    from tests.hugging_face import loss_of

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return loss_of(model, batch["tokens"], batch["labels"], batch["loss_mask"])


@pytest.mark.parametrize(
    "model, grid",
    [
        (MIXTRAL, f"{cp(2, 1)} {ep(4)} {A2A} {ZERO1}"), (latents.EXPERTS, f"{SP} {cp(1, 2)} {ep(2)}"),
        *also_in_full((ADAPTED, f"{cp(2, 1)} {ep(4)} {A2A} {ZERO1}")),
    ],
)  # fmt: skip
def test_a_trained_model_has_the_same_loss_in_transformers(pool, tmp_path, model, grid):
    from tools.convert_hf import main as convert

    pool.run(train_and_save, 4, f"{model} {grid}", str(tmp_path / "ours"), timeout=120)
    loss, batch = pool.run(evaluated_batch, 1, model, str(tmp_path / "ours"), timeout=120)[0]
    assert convert(["--from", str(tmp_path / "ours"), "--to-hf", str(tmp_path / "hf")]) == 0
    assert loss_in_transformers(tmp_path / "hf", batch) == pytest.approx(loss, rel=1e-5)
