# SPDX-License-Identifier: Apache-2.0
"""A simulated GPU takes the attention kernel that `kernels.select` would take there, and prices its launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron.context_parallel as cp
from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels import KernelUnavailable
from megatron.context_parallel.attention.kernels.triton_kernels import triton_tiles
from megatron.context_parallel.fpdt.chunked_loss import add_product
from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.positions.alibi import alibi_slopes
from megatron.simulator.cost.seconds import attention_named, kernel_seconds
from megatron.simulator.cost.trace import Kernel
from megatron.simulator.dry_run.recording.gpu_kernels import gpu_kernels
from megatron.simulator.dry_run.recording.recorder import Recorder
from megatron.simulator.machines.machine_file import load

bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
MASK, MANY = {"needs_mask": True}, {"many_tiles": True}


@pytest.mark.parametrize(
    "gpu, name, dtype, head, how, chosen",
    [
        ("A100-80G", "auto", bf16, 64, {}, "flash"),
        ("H100-80G", "auto", bf16, 128, {}, "cudnn"),
        ("B200-192G", "auto", bf16, 128, {}, "cudnn"),
        ("H100-80G", "auto", bf16, 256, {}, "cudnn"),
        ("B200-192G", "auto", bf16, 256, {}, "flash"),  # cuDNN has heads above 128 on Hopper alone
        ("L20-48G", "auto", bf16, 256, {}, "triton"),  # nor has flash attention, backward, on a small GPU
        ("H100-80G", "auto", bf16, 100, {}, "triton"),  # no multiple of 8
        ("H100-80G", "auto", fp32, 128, {}, "triton"),
        ("H100-80G", "auto", fp64, 128, {}, "math"),
        ("H100-80G", "auto", bf16, 512, {}, "math"),
        ("A100-80G", "auto", bf16, 128, MANY, "triton"),
        ("H100-80G", "auto", bf16, 128, MANY, "triton"),
        ("H100-80G", "cudnn", bf16, 128, MANY, "cudnn"),
        ("H100-80G", "flash_attn", bf16, 128, {}, "flash_attn"),
        ("A100-80G", "auto", bf16, 64, {"needs_dropout": True}, "triton"),
        ("A100-80G", "auto", bf16, 64, {"needs_softcap": True}, "triton"),
        ("A100-80G", "auto", bf16, 64, MASK, "triton"),
        ("A100-80G", "auto", fp64, 64, MASK, "math"),
        ("A100-80G", "triton", bf16, 64, {}, "triton"),
        ("A100-80G", "math", bf16, 64, MASK, "math"),
    ],
)
def test_what_a_gpu_would_take(gpu, name, dtype, head, how, chosen):
    with gpu_kernels(Recorder({}), load(gpu)):
        assert kernels.select(name, device="cpu", dtype=dtype, head_dim=head, **how).name == chosen


@pytest.mark.parametrize(
    "gpu, kernel, many, chosen",
    [
        ("H100-80G", "flash_attn", False, "flash_attn"),  # version 3
        ("B200-192G", "flash_attn", False, "cudnn"),  # version 2, which has nothing of Blackwell's
        ("H100-80G", "flash", False, "flash"),
        ("H100-80G", "flash", True, "triton"),
    ],
)
def test_a_machine_that_names_its_kernel(gpu, kernel, many, chosen):
    machine = replace(load(gpu), attention_kernel=kernel)
    assert machine.choose_attention("auto", bf16, 128, many_tiles=many) == chosen


@pytest.mark.parametrize(
    "name, head, how, says",
    [
        ("flash", 64, MASK, "does not support masks.*can run there: triton, math"),
        ("cudnn", 256, {}, "at most 128"),
        ("cpu", 64, {}, "needs tensors on the CPU"),
        ("fa4", 64, {}, "no such kernel"),
    ],
)
def test_what_a_gpu_would_refuse(name, head, how, says):
    with pytest.raises(KernelUnavailable, match=says):
        load("A100-80G").choose_attention(name, bf16, head, **how)


@pytest.mark.parametrize("gpu", ["A100-80G", "H100-80G", "B200-192G", "L20-48G"])
@pytest.mark.parametrize("head", [64, 128, 192, 256])
def test_a_gpu_that_is_here_and_one_that_is_not_choose_alike(monkeypatch, gpu, head):
    machine = load(gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: machine.capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    for many in (False, True):
        order = kernels.available("cuda", bf16, head, many_tiles=many)
        here = [name for name in order if name not in ("triton", "flash_attn")]  # which may not be installed here
        there = machine.choose_attention("auto", bf16, head, many_tiles=many)
        assert there == ("triton" if many or here[0] == "math" else here[0])


def test_the_closed_form_prices_what_the_dry_run_does():
    machine, shape = load("B200-192G"), (32768.0, 32768.0, 32.0, 256.0)
    closed, recorded = (Kernel(name, "attention", 4e15, 1e9, shape) for name in ("attention", attention_named("flash")))
    assert kernel_seconds(closed, machine) == kernel_seconds(recorded, machine)
    assert kernel_seconds(closed, machine) > 4 * kernel_seconds(replace_name(closed, "cudnn"), machine)


def replace_name(kernel: Kernel, name: str) -> Kernel:
    return replace(kernel, name=attention_named(name))


def launches(mask, s=256, b=2, h=4, d=64, **how):
    layout = cp.SequenceLayout(s, abstract_grid())
    q, k, v = (torch.randn(s, b, h, d, dtype=bf16, requires_grad=True) for _ in range(3))
    recorder = Recorder({})
    with gpu_kernels(recorder, load("H100-80G")), recorder:
        out = cp.attention(q, k, v, layout=layout, mask=mask, **how)
        out.backward(torch.ones_like(out))
    return [event for event in recorder.trace.events if getattr(event, "kind", "") == "attention"], recorder.trace


def test_products_that_add_to_a_sum_are_products():
    recorder = Recorder({})
    with FakeTensorMode(), gpu_kernels(recorder, load("A100-80G")), recorder:
        total, a, b = torch.empty(6, 5), torch.empty(6, 3, dtype=bf16), torch.empty(3, 5, dtype=bf16)
        add_product(total, a, b)  # narrow matrices into a wide sum
        add_product(total, a.float(), b.float())
    products = [event for event in recorder.trace.events if getattr(event, "kind", "") == "gemm"]
    sums = 2 * 4 * 6 * 5  # read and written
    assert [(one.name, one.flops, one.bytes, one.itemsize) for one in products] == [
        ("addmm", 2 * 6 * 3 * 5, sums + 2 * (6 * 3 + 3 * 5), 2),
        ("addmm_", 2 * 6 * 3 * 5, sums + 4 * (6 * 3 + 3 * 5), 4),
    ]


def test_tritons_launches_are_priced_by_the_pairs_of_their_tiles():
    found, _ = launches(cp.Causal(), alibi_slopes=alibi_slopes(4))
    assert {one.name for one in found} == {attention_named("triton")}
    pairs = 2 * 4 * 64 * 256 * 257 // 2
    assert [(one.flops, one.backward) for one in found] == [(4 * pairs, False), (6 * pairs, True), (8 * pairs, True)]
    machine = load("H100-80G")
    assert machine.kernels["triton"] < machine.attention_share()
    assert all(kernel_seconds(one, machine) >= machine.launch for one in found)


def test_a_window_is_one_launch_and_two():
    found, _ = launches(cp.Window(63))
    assert [one.backward for one in found] == [False, True, True]
    pairs = sum(min(row + 1, 64) for row in range(256))
    assert found[0].flops == 4 * 2 * 4 * 64 * pairs


def test_a_mask_of_pairs_is_asked_once_a_pass(monkeypatch):
    mask = cp.MaskFunction(lambda q, k: (q - k) % 3 != 1)
    found, trace = launches(mask)
    assert len(found) == 3
    asked = [event.bytes for event in trace.events if getattr(event, "name", "") == "mask_bits"]
    assert len(asked) == 2 and asked[0] == asked[1] == 24 * 256 * 256
    # Bits that do not fit at once make more launches, as of the kernel itself.
    monkeypatch.setattr(triton_tiles, "BITS_AT_ONCE", 4096)
    monkeypatch.setattr(triton_tiles, "MASKED_ROWS", 64)
    assert len(launches(mask)[0]) == 3 * 2
