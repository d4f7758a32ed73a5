# SPDX-License-Identifier: Apache-2.0
"""On a simulated GPU, what the fused kernels do not take is Triton's: priced by the pairs of its tiles."""

import pytest
import torch

import megatron.context_parallel as cp
from megatron.context_parallel.attention import kernels
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.simulator.cost.seconds import TRITON, kernel_seconds
from megatron.simulator.dry_run.gpu_kernels import gpu_kernels
from megatron.simulator.dry_run.recorder import Recorder
from megatron.simulator.machines.machine_file import load

BF16 = {"device": "cpu", "dtype": torch.bfloat16, "head_dim": 64}


@pytest.mark.parametrize(
    "name, needs, dtype, chosen",
    [
        ("auto", {}, torch.bfloat16, "flash"),
        ("auto", {"needs_dropout": True}, torch.bfloat16, "triton"),
        ("auto", {"needs_mask": True}, torch.bfloat16, "triton"),
        ("auto", {"needs_mask": True}, torch.float64, "math"),
        ("triton", {}, torch.bfloat16, "triton"),
        ("math", {"needs_mask": True}, torch.bfloat16, "math"),
    ],
)
def test_what_stands_for_a_gpus_kernel(name, needs, dtype, chosen):
    with gpu_kernels(Recorder({})):
        assert kernels.select(name, **{**BF16, "dtype": dtype}, **needs).name == chosen


def test_its_launches_are_priced_by_the_pairs_of_their_tiles():
    s, b, h, d = 256, 2, 4, 64
    layout = cp.SequenceLayout(s, abstract_grid())
    q, k, v = (torch.randn(s, b, h, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    recorder = Recorder({})
    with gpu_kernels(recorder), recorder:
        out = cp.attention(q, k, v, layout=layout, alibi_slopes=alibi_slopes(h))
        out.backward(torch.ones_like(out))
    launches = [event for event in recorder.trace.events if getattr(event, "name", "") == TRITON]
    pairs = b * h * d * s * (s + 1) // 2
    assert [(one.flops, one.backward) for one in launches] == [(4 * pairs, False), (6 * pairs, True), (8 * pairs, True)]
    machine = load("H100-80G")
    assert machine.kernels["triton"] < machine.attention_share
    assert all(kernel_seconds(one, machine) >= machine.launch for one in launches)
