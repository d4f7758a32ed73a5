# SPDX-License-Identifier: Apache-2.0
"""Linear-attention layers (Gated DeltaNet): losses and all gradients do not depend on the grid."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed.flags import FULL, P2, SELECTIVE, SP, cp, fpdt
from tests.distributed.training_runs import compare_runs, make_job, train_job, wrong_by
from tests.errors import change_last_bits, limit_of_rounding

SIZES = (
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 12 "
    "--experimental-attention-variant gated_delta_net"
)
# Three linear-attention layers, one with a window and one with full attention; all gates of Qwen3-Next.
HYBRID = (
    f"--num-layers 5 {SIZES} --linear-attention-freq [1,0,1,1,0] --window-size 11,0 "
    "--window-attn-skip-freq [0,1,0,0,0] "
    "--attention-output-gate --qk-layernorm --rotary-percent 0.5 --apply-layernorm-1p --init-method-std 0.05"
)
SHORT = f"--num-layers 3 {SIZES} --linear-attention-freq [1,0,1] --init-method-std 0.1"
DROPOUT = f"{SHORT} --hidden-dropout 0.1 --attention-dropout 0.1"
DOCUMENTS = f"{SHORT} --reset-attention-mask --reset-position-ids"
ONE = f"{DOCUMENTS} --micro-batch-size 1 --global-batch-size 2"
EXPERTS = (
    f"{SHORT} --num-experts 4 --moe-ffn-hidden-size 48 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
    "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate"
)

UNEVEN = "--decoder-first-pipeline-num-layers 1"  # one stage has states alone
FPDT, CHUNKS = fpdt(16), fpdt(32)

# (processes, model, grid)
CASES = [
    (2, ONE, cp(1, 2, "documents")),
    (4, SHORT, f"{SP} {cp(1, 2)} {SELECTIVE} --zero-stage 2 --ffn-chunks 3 --linear-attention-exchange gather"),
    (4, HYBRID, f"{P2} {UNEVEN} {cp(1, 2, 'contiguous')} --zero-stage 1 --linear-attention-exchange relay"),
    (2, DROPOUT, f"{cp(2, 1)} {CHUNKS} --no-fpdt-offload --linear-attention-exchange heads"),
    (2, DOCUMENTS, f"{cp(1, 2)} {FULL} --zero-stage 3"),
    (4, EXPERTS, f"{cp(2, 1)} --expert-model-parallel-size 4 {CHUNKS} --fpdt-stream-hidden"),
    (2, EXPERTS, f"{cp(1, 2)} --expert-model-parallel-size 2"),
]


def without_states(job: Any) -> None:
    """A mistake: no state goes from one span to the next."""
    from megatron.context_parallel.linear_attention import mixer

    right = mixer.entry_states
    mixer.entry_states = lambda *args: {name: torch.zeros_like(state) for name, state in right(*args).items()}
    return lambda: setattr(mixer, "entry_states", right)


def without_halo(job: Any) -> Any:
    """A mistake: a convolution does not see the rows before its span."""
    from megatron.context_parallel.linear_attention.short_convolution import Halo

    right = Halo.fetch
    Halo.fetch = lambda self, x: torch.zeros_like(right(self, x))
    return lambda: setattr(Halo, "fetch", right)


def own_norm(job: Any) -> Any:
    """A mistake, core's: each TP rank has the gradient of the norm from its own heads."""
    from megatron.context_parallel.core.mixers import gated_delta_net

    right = gated_delta_net.copy_to_tensor_model_parallel_region
    gated_delta_net.copy_to_tensor_model_parallel_region = lambda x, group: x
    return lambda: setattr(gated_delta_net, right.__name__, right)


def last_bit(job: Any) -> Any:
    """What this changes in the gradients is rounding."""
    change_last_bits(parameter for chunk in job.model_chunks for parameter in chunk.parameters())
    return lambda: None


def run(flags: str, mistake: Any = None, steps: int = 2) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of two steps, and the gradients of the first, with states that last."""
    from megatron.context_parallel.core.mixers import state_mixer

    usual, state_mixer.DECAY_RANGE = state_mixer.DECAY_RANGE, (0.01, 0.2)
    undo = None
    try:
        job = make_job(flags)
        undo = mistake(job) if mistake is not None else None
        return train_job(job, steps)
    finally:
        state_mixer.DECAY_RANGE = usual
        if undo is not None:
            undo()


def largest_error(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(wrong_by(grads, expected, name) for name in grads)


def limit_of_gradients(results: list[tuple], model: str, reference: Callable) -> float:
    """1e-5, or twice the effect of rounding the weights on one process if the results err by more.

    With experts, that effect is 1.3e-5, on the decays of the last layer; grids err by 4e-6 to 1.1e-5, and in fp64 by
    nothing (test_layer_kinds.py).
    """
    expected = reference(run, model)[2]
    if all(largest_error(grads, expected) < 1e-5 for *_, grads in results):
        return 1e-5
    # a larger one: the last bit chooses other experts
    return limit_of_rounding(1e-5, largest_error(reference(run, model, last_bit)[2], expected), 1e-4)


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(0, 2, 6)
def test_states_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    results = pool.run(run, world, f"{model} {grid}", timeout=180)
    compare_runs(results, reference(run, model), of_gradients=limit_of_gradients(results, model, reference))


@pytest.mark.lab
def test_the_limit_of_rounding_notices_a_mistake(pool, reference):
    wrong = pool.run(run, 2, f"{EXPERTS} {cp(1, 2)}", without_states, timeout=120)
    with pytest.raises(AssertionError, match="gradient of|losses of|norms of"):
        compare_runs(wrong, reference(run, EXPERTS), of_gradients=limit_of_gradients(wrong, EXPERTS, reference))


def norm_over_a_group() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Result and gradients of the norm where heads are split over a group that is not TP's; by the definition."""
    from megatron.context_parallel import initialize_grid
    from megatron.context_parallel.core.mixers.gated_delta_net import GatedDeltaNet

    group = initialize_grid(ring=2).context.group
    generator = torch.Generator().manual_seed(1)
    mixed, gate, dout = torch.randn(3, 5, 2, 4, 12, generator=generator, dtype=torch.float64)
    weight = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    normed = mixed * (mixed.square().mean(-1, keepdim=True) + 1e-3) ** -0.5
    whole = normed * (1 + weight) * gate * gate.sigmoid()
    (expected,) = torch.autograd.grad(whole, weight, dout)
    mixer = SimpleNamespace(
        tp_group=group,
        value_dim=12,
        out_norm=SimpleNamespace(weight=weight),
        config=SimpleNamespace(layernorm_zero_centered_gamma=True, layernorm_epsilon=1e-3),
    )
    mixed, gate, dout, whole = (x.chunk(2, dim=2)[group.rank()] for x in (mixed, gate, dout, whole))
    out = GatedDeltaNet.gated_norm(mixer, mixed, gate.flatten(2))
    (dweight,) = torch.autograd.grad(out, weight, dout.flatten(2))
    return {"out": out.detach(), "dweight": dweight}, {"out": whole.detach().flatten(2), "dweight": expected}


def test_the_norm_is_that_of_the_definition(pool):
    for mine, expected in pool.run(norm_over_a_group, 2):
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)


def test_gates_of_bf16_layers_are_computed_in_fp32():
    from megatron.context_parallel.core.mixers.gated_delta_net import GatedDeltaNet

    draw = torch.randn(6, 50, 2, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    mixer = SimpleNamespace(key_heads=1, key_dim=4, heads=4, convolved={"query": 4, "key": 4, "value": 4})
    mixer.A_log, mixer.dt_bias = draw[0, 0, 0], draw[0, 1, 0]
    beta, alpha, a_log, dt_bias = (x.double() for x in (draw[1], draw[2], mixer.A_log, mixer.dt_bias))
    *_, g, factor = GatedDeltaNet.inputs_of_rule(mixer, torch.cat([*draw[3:]], dim=-1), draw[1], draw[2])
    assert g.dtype == factor.dtype == torch.float32
    torch.testing.assert_close(g.double(), -a_log.exp() * (1 + (alpha + dt_bias).exp()).log(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(factor.double(), 1 / (1 + (-beta).exp()), rtol=1e-5, atol=1e-6)


BF16 = f"{SHORT} --bf16"


@pytest.mark.parametrize("world, grid", [(2, cp(1, 2)), (4, f"{SP} {cp(2, 1)} --zero-stage 1")])
@pytest.mark.usual(0)
def test_bf16(pool, reference, world, grid):
    """Gradients differ from one process by no more than by its rounding, which is measured against fp32."""
    exact, near = reference(run, SHORT), reference(run, BF16)
    rounding = max_error(near[2], exact[2])
    results = pool.run(run, world, f"{BF16} {grid}", timeout=120)
    for losses, _, grads in results:
        assert losses == pytest.approx(near[0], rel=1e-3)
        assert max_error(grads, near[2]) < 2 * rounding


def max_error(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error of a matrix's gradients, relative to its norm."""
    return max(
        float((grads[name] - whole).norm() / whole.norm()) for name, whole in expected.items() if whole.dim() == 2
    )
