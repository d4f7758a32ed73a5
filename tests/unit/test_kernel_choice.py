# SPDX-License-Identifier: Apache-2.0
"""The choice of kernels: refusals, the order of ``auto``, and the releases of flash-attn by their arguments."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from importlib import metadata
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.context_parallel.attention import kernels
from megatron.context_parallel.attention.kernels import KERNELS, KernelUnavailable, available, flash_attn_kernel, select
from megatron.context_parallel.attention.kernels.tile_by_tile import TileScores
from megatron.context_parallel.attention.kernels.triton_kernels import triton_kernel
from megatron.context_parallel.attention.rule import AttentionRule
from megatron.context_parallel.layout.grid import Axis
from megatron.context_parallel.layout.masks import Causal, Documents, Full, MaskFunction, Window, tile_rows
from megatron.context_parallel.linear_attention import block_scan, decay_spans, fla_kernels, mixer
from megatron.context_parallel.linear_attention.rules import RULES, prepare, recurrence
from megatron.context_parallel.linear_attention.span_maps import segments
from megatron.decisions import kernel_order
from megatron.decisions.kernel_order import BY_NAME, preferred
from tests.unit.test_kernels import CPU_KERNELS, assert_close, both_ways, dense, make


def bshd_forward(q, k, v, softmax_scale, causal):
    out, lse = KERNELS["math"].forward(*(x.transpose(1, 2) for x in (q, k, v)), TileScores(softmax_scale, causal))
    return out.transpose(1, 2).contiguous(), lse


def bshd_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal):
    tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    grads = KERNELS["math"].backward(*tensors, softmax_lse, TileScores(softmax_scale, causal))
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        into.copy_(grad.transpose(1, 2))


def flash_attn_2_6() -> types.SimpleNamespace:
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
    ):
        assert (dropout_p, window_size, softcap, alibi_slopes, return_softmax) == (0.0, (-1, -1), 0.0, None, False)
        out, lse = bshd_forward(q, k, v, softmax_scale, causal)
        return out, q, k, v, out, F.pad(lse, (0, 104)), None, torch.empty(2, dtype=torch.int64)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size, softcap, deterministic, rng_state) == (0.0, (-1, -1), 0.0, False, None)
        bshd_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return dq, dk, dv, None

    return types.SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


def flash_attn_2_7() -> types.SimpleNamespace:
    @torch.library.custom_op("test_kernel_choice::_flash_attn_forward", mutates_args=())
    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
        return_softmax: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, return_softmax) == (0.0, -1, -1, 0.0, False)
        return *bshd_forward(q, k, v, softmax_scale, causal), torch.empty(0), torch.empty(2)

    @torch.library.custom_op("test_kernel_choice::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
        dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int, window_size_right: int,
        softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert (window_size_left, window_size_right, deterministic, rng_state) == (-1, -1, False, None)
        bshd_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal)
        return torch.empty(0)

    return types.SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


def flash_attn_3() -> types.SimpleNamespace:
    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, num_splits=1,
    ):  # fmt: skip
        assert {k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k} == {None} and window_size == (-1, -1)
        return *bshd_forward(q, k, v, softmax_scale, causal), torch.empty(0)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, sequed_q=None, max_seqlen_q=None, dq=None, dk=None, dv=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
        deterministic=False,
    ):  # fmt: skip
        assert {cu_seqlens_q, sequed_q, max_seqlen_q} == {None} and not deterministic
        bshd_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal)

    return types.SimpleNamespace(_flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward)


@pytest.fixture
def install(monkeypatch):
    """A function that puts a module in place of an installed flash-attn."""

    def put(name, module):
        monkeypatch.setitem(sys.modules, name, module)
        flash_attn_kernel._library.cache_clear()

    flash_attn_kernel._library.cache_clear()
    yield put
    flash_attn_kernel._library.cache_clear()


@pytest.mark.parametrize("release", [flash_attn_2_6, flash_attn_2_7, flash_attn_3])
def test_flash_attn_by_the_arguments_of_its_releases(release, install):
    install("flash_attn.flash_attn_interface", release())
    for shape, causal in ((dict(h=4, hk=2), False), (dict(h=4, hk=1, sk=24), True)):
        tensors = make(dtype=torch.float32, **shape)
        got = both_ways(KERNELS["flash_attn"], *tensors, causal=causal)
        assert_close(got, dense(*tensors, causal=causal), torch.float32)


def test_the_release_of_flash_attn_depends_on_the_gpu(install):
    two, three = flash_attn_2_6(), flash_attn_3()
    install("flash_attn.flash_attn_interface", two)
    assert flash_attn_kernel._library(False) is two and flash_attn_kernel._library(True) is two
    install("flash_attn_interface", three)
    assert flash_attn_kernel._library(False) is two and flash_attn_kernel._library(True) is three
    install("flash_attn.flash_attn_interface", types.SimpleNamespace())
    assert "lacks" in flash_attn_kernel._library(False)
    with pytest.raises(ImportError, match='kernel="flash_attn"'):
        KERNELS["flash_attn"].forward(*make()[1:], TileScores(1.0))


def test_plans_use_a_kernel_that_nothing_ranks_only_if_the_machine_measured_it(monkeypatch):
    monkeypatch.setitem(kernel_order.KERNELS, "own", "own:Own")
    assert kernel_order.lacks("own", (9, 0), 128) == kernel_order.UNMEASURED
    assert kernel_order.plain_kernel((9, 0), "own", 100) == "own"
    assert kernel_order.plain_kernel((9, 0), "auto", 100) == "triton"


def test_kernels_are_named_in_one_place():
    assert set(kernel_order.KERNELS) == set(KERNELS)
    for capability in (None, (8, 0), (9, 0), (10, 0)):
        assert sorted(preferred(capability, tile_rows=0.0)) == sorted(kernel_order.KERNELS)


def test_auto_on_the_cpu():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert available("cpu", dtype, 64) == ["cpu", "math"]
        assert select("auto", device="cpu", dtype=dtype, head_dim=64, needs_mask=True).name == "cpu"
    for name in CPU_KERNELS:
        assert select(name, device=torch.device("cpu"), dtype=torch.float32, head_dim=7).name == name


@pytest.mark.parametrize(
    "name, options, reason",
    [
        ("flash", {}, "needs a GPU"),
        ("cudnn", {}, "needs a GPU"),
        ("flash_attn", {}, "needs a GPU"),
        ("flash", dict(needs_mask=True), "does not support masks"),
        ("flash", dict(needs_softcap=True), "does not support a soft-cap"),
        ("cudnn", dict(needs_value_dim=True), "does not support value heads of another size"),
        ("sdpa", {}, f"no such kernel, only auto, {', '.join(KERNELS)}"),
    ],
)
def test_refusals(name, options, reason):
    with pytest.raises(KernelUnavailable) as error:
        select(name, device="cpu", dtype=torch.bfloat16, head_dim=64, **options)
    assert isinstance(error.value, ValueError)
    message = str(error.value)
    assert message.startswith(f'kernel="{name}": {reason}') and "\n" not in message
    assert message.endswith("kernels that can run here: cpu, math")


def test_no_kernel_at_all():
    with pytest.raises(KernelUnavailable, match="no kernel supports torch.int32 on cpu; .*: none"):
        select("auto", device="cpu", dtype=torch.int32, head_dim=64)
    with pytest.raises(KernelUnavailable, match='kernel="cpu": needs tensors on the CPU; .*: math'):
        select("cpu", device="meta", dtype=torch.float32, head_dim=64)


@pytest.fixture
def pretend_gpu(monkeypatch, install):
    """A stand-in for a GPU, sufficient for `why_not`."""

    def pretend(capability=(9, 0), cudnn=91000):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(triton_kernel, "missing_triton", lambda: None)
        monkeypatch.setattr(triton_kernel, "interpreted", lambda: False)

    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", None)  # as if not installed
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", raising=False)
    return pretend


def test_preferences_on_a_gpu(pretend_gpu, install, monkeypatch):
    bf16 = torch.bfloat16
    pretend_gpu()
    assert available("cuda", bf16, 128) == ["cudnn", "flash", "triton", "math"]
    for need in kernels.NEEDS:
        assert available("cuda", bf16, 128, **{need: True}) == ["triton", "math"]
    assert available("cuda", bf16, 256) == ["cudnn", "flash", "triton", "math"]
    assert available("cuda", bf16, 100) == available("cuda", torch.float32, 128) == ["triton", "math"]
    assert available("cuda", torch.float64, 128) == ["math"]
    with pytest.raises(KernelUnavailable, match='kernel="flash_attn": the package flash-attn is not installed'):
        select("flash_attn", device="cuda", dtype=bf16, head_dim=128)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "1")
    assert available("cuda", bf16, 128) == ["flash", "triton", "math"]
    monkeypatch.delenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert available("cuda", bf16, 128) == ["flash", "triton", "math"]
    monkeypatch.setattr(triton_kernel, "missing_triton", lambda: "the package triton is not installed")
    with pytest.raises(KernelUnavailable, match='kernel="triton": the package triton is not installed'):
        select("triton", device="cuda", dtype=bf16, head_dim=128)
    monkeypatch.undo()
    pretend_gpu(capability=(8, 6), cudnn=90000)
    install("flash_attn.flash_attn_interface", flash_attn_2_6())
    assert available("cuda", bf16, 128) == ["flash_attn", "flash", "cudnn", "triton", "math"]
    assert available("cuda", bf16, 256) == ["flash_attn", "triton", "math"]
    pretend_gpu(capability=(7, 5))
    assert available("cuda", torch.float16, 64) == ["math"]


@pytest.mark.parametrize(
    "capability, version, order",
    [
        ((8, 0), 2, ["flash_attn", "flash", "cudnn"]),
        ((8, 9), None, ["flash_attn", "flash", "cudnn"]),
        ((9, 0), 3, ["flash_attn", "cudnn", "flash"]),
        ((9, 0), 2, ["cudnn", "flash_attn", "flash"]),
        ((9, 0), None, ["cudnn", "flash_attn", "flash"]),
        ((10, 0), 2, ["cudnn", "flash_attn", "flash"]),
        ((10, 3), None, ["cudnn", "flash_attn", "flash"]),
        ((12, 0), 2, ["flash_attn", "flash", "cudnn"]),
    ],
)
def test_the_order_by_machine(capability, version, order):
    result = list(preferred(capability, flash_attn=version))
    assert result == [*order, "triton", "cpu", "math", *BY_NAME]
    small = list(preferred(capability, flash_attn=version, tile_rows=1024.0))
    order.remove("cudnn")  # it comes later, because it makes a plan for each shape
    assert small == ["triton", *order, "cudnn", "cpu", "math", *BY_NAME]
    assert set(KERNELS) <= set(small)


def test_the_order_by_the_size_of_tiles():
    few = Documents(tuple(2**17 * (i + 1) for i in range(8)))
    many = Documents(tuple(1000 * (i + 1) for i in range(1000)))
    first = {name: tile_rows(mask) for name, mask in {"few": few, "many": many, "window": Window(1023)}.items()}
    assert first == {"few": 2**17, "many": 1000, "window": 1024}
    assert tile_rows(replace(few, within=Window(1023))) == 1024 and tile_rows(Causal()) == tile_rows(Full()) == inf
    assert tile_rows(MaskFunction(torch.ge, Causal())) == tile_rows(Window(2**17, global_tokens=1)) == 0
    for version, fastest in ((3, "flash_attn"), (None, "cudnn")):
        order = [preferred((9, 0), flash_attn=version, tile_rows=rows)[0] for rows in first.values()]
        assert order == [fastest, "triton", "triton"]
    assert preferred((9, 0), tile_rows=1024.0, crossover={"cudnn": 512.0})[0] == "cudnn"
    assert preferred((8, 0), tile_rows=2048)[0] == "triton" and preferred((8, 0), tile_rows=8192)[0] == "flash_attn"
    for rows in (1024, 2**17):  # FlashAttention-2 is not faster on Hopper
        order = preferred((9, 0), flash_attn=2, tile_rows=rows)
        assert order.index("triton") < order.index("flash_attn") < order.index("flash")


def test_the_documents_of_each_batch_determine_the_kernel(monkeypatch):
    """A rule with ``auto`` selects again for each mask, by the size of its tiles."""
    sizes = []
    real = kernels.select
    monkeypatch.setattr(
        kernels, "select", lambda *args, **options: sizes.append(options["tile_rows"]) or real(*args, **options)
    )
    q = torch.zeros(64, 1, 2, 8)
    for ends in ((32, 64), (4, 8, 64), (64,)):
        AttentionRule(Documents(ends)).tile_kernel(q, Axis(1, 0), 64)
    assert sizes == [tile_rows(Documents(ends)) for ends in ((32, 64), (4, 8, 64), (64,))]
    assert len(set(sizes)) == 3


@pytest.mark.parametrize(
    "kernel, changed",
    [
        (True, {}),
        (True, {"capability": (9, 0)}),
        (True, {"keys": 8}),
        (True, {"dtype": torch.bfloat16}),
        (False, {"keys": 129}),
        (False, {"dtype": torch.float64}),
        (False, {"device": "cpu"}),
        (False, {"capability": (7, 5)}),
        (False, {"missing": "needs triton 3.3"}),
        (False, {"interpreted": True}),
    ],
    ids=str,
)
def test_states_of_linear_attention_use_a_kernel_on_gpus(monkeypatch, kernel, changed):
    case = {"dtype": torch.float32, "device": "cuda", "keys": 128, "capability": (8, 0)} | changed
    monkeypatch.setattr(block_scan, "missing_triton", lambda: case.get("missing"))
    monkeypatch.setattr(block_scan, "interpreted", lambda: case.get("interpreted", False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    x = types.SimpleNamespace(dtype=case["dtype"], device=torch.device(case["device"]))
    assert block_scan.by_kernel(x, case["keys"]) == kernel


@pytest.mark.parametrize("kernel, used", [(None, False), (False, False), (True, True)])
def test_states_on_a_cpu_use_a_kernel_only_if_asked(monkeypatch, kernel, used):
    launched = []
    for name in ("states_launch", "grads_launch"):
        launch = types.SimpleNamespace(run=lambda name=name: launched.append(name))
        monkeypatch.setattr(block_scan, name, lambda *_, launch=launch: launch)
    rule, x = RULES["decay"], torch.ones(1, 1, 8, 4)
    ready = prepare(rule, x, x, x, -x[..., 0], x[..., 0], block=4)
    state = torch.zeros(1, 1, 4, 4)
    block_scan.states(ready, state, kernel)
    block_scan.state_after(ready, state, kernel)
    block_scan.state_grads(ready, torch.ones(1, 1, 2, 4, 4), state, kernel)
    assert launched == used * ["states_launch", "states_launch", "grads_launch"]


@pytest.mark.parametrize("keys, key_block, values, count", [(8, 16, 20, 2), (64, 64, 16, 1), (100, 128, 64, 4)])
def test_a_block_of_a_state_holds_all_keys_and_some_values(keys, key_block, values, count):
    ready = types.SimpleNamespace(
        own=torch.empty(2, 3, 5, 4, values), writes=torch.empty(2, 3, 5, 4, keys), keep=torch.empty(1, 1), erase=None
    )
    launch = block_scan.launch("states_kernel", ready, {}, values)
    assert (launch.arguments["KEY_BLOCK"], launch.grid, launch.arguments["blocks"]) == (key_block, (count, 2 * 3), 5)


FLA = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "keys": 128, "values": 128}


@pytest.mark.parametrize(
    "changed, version, reason",
    [
        ({}, "0.6.0", "cannot be imported: no Triton"),
        ({}, None, "needs the package fla-core>=0.6,<0.7"),
        ({}, "0.5.2", "0.5.2 is installed"),
        ({"device": torch.device("cpu")}, "0.6.0", "needs a GPU"),
        ({"dtype": torch.float64}, "0.6.0", "needs bf16, fp16 or fp32"),
        ({"keys": 512}, "0.6.0", "needs heads of at most 256 keys"),
    ],
)
def test_where_the_kernels_of_fla_run(monkeypatch, changed, version, reason):
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    def imported(name: str):
        raise RuntimeError("no Triton")

    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(fla_kernels, "import_module", imported)
    monkeypatch.setattr(fla_kernels, "missing", fla_kernels.missing.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reason in fla_kernels.why_not(RULES["kda"], **FLA | changed)
    assert "no kernel for the rule other" in fla_kernels.why_not(replace(RULES["kda"], name="other"), **FLA)


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({"dtype": torch.float32}, "needs bf16"),
        ({"values": 128}, "needs heads of at most 128 keys and 64 values"),
        ({"keys": 256}, "needs heads of at most 128 keys and 64 values"),
        ({"device": torch.device("cpu")}, "needs a GPU"),
    ],
)
def test_where_the_kernels_for_rules_without_a_delta_run(monkeypatch, changed, reason):
    monkeypatch.setattr(decay_spans, "missing_triton", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    case = FLA | {"values": 64}
    assert decay_spans.why_not(RULES["mamba2"], **case) is None
    assert decay_spans.why_not(RULES["mamba2"], **case | changed) == reason
    with pytest.raises(KernelUnavailable, match="no kernel for rules with a delta; the kernel blocks runs here"):
        mixer.chosen_kernel("triton", RULES["kda"], **case)
    assert mixer.chosen_kernel("triton", RULES["mamba2"], **case) == "triton"


def test_the_kernel_of_linear_attention(monkeypatch):
    cpu = FLA | {"device": torch.device("cpu")}
    assert mixer.chosen_kernel("auto", RULES["kda"], **cpu) == mixer.chosen_kernel("blocks", RULES["kda"], **cpu)
    with pytest.raises(KernelUnavailable, match='kernel="fla": needs a GPU; the kernel blocks runs here'):
        mixer.chosen_kernel("fla", RULES["kda"], **cpu)
    with pytest.raises(KernelUnavailable, match="no such kernel of linear attention, only auto, fla, triton, blocks"):
        mixer.chosen_kernel("warp", RULES["kda"], **cpu)
    monkeypatch.setattr(fla_kernels, "why_not", lambda *_, **__: None)
    assert mixer.chosen_kernel("auto", RULES["kda"], **FLA) == mixer.chosen_kernel("fla", RULES["kda"], **FLA) == "fla"
    assert mixer.chosen_kernel("blocks", RULES["kda"], **FLA) == "blocks"


def test_the_order_without_a_gpu():
    assert preferred(None)[0] == "cpu" and set(preferred(None)) == set(preferred((9, 0)))


def test_flash_attn_3_is_preferred_to_cudnn_and_cudnn_to_flash_attn_2(pretend_gpu, install):
    bf16 = torch.bfloat16
    pretend_gpu()
    install("flash_attn.flash_attn_interface", flash_attn_2_6())
    assert available("cuda", bf16, 128)[:2] == ["cudnn", "flash_attn"]
    assert available("cuda", bf16, 128, tile_rows=0.0)[-2:] == ["cudnn", "math"]
    install("flash_attn_interface", flash_attn_3())
    assert available("cuda", bf16, 128)[:2] == ["flash_attn", "cudnn"]
    assert flash_attn_kernel.installed_version((9, 0)) == 3 and flash_attn_kernel.installed_version((8, 0)) == 2
    assert flash_attn_kernel.installed_version(None) is None


def test_a_library_with_one_of_the_two_passes_is_not_used(install):
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        install("flash_attn.flash_attn_interface", types.SimpleNamespace(**{name: print}))
        assert "lacks" in flash_attn_kernel._library(False)


def test_arguments_that_a_registered_operator_requires():
    """Releases from 2.7 on register their functions, which hides the signatures."""

    def attend(q: Tensor, scale: float, causal: bool = False) -> Tensor:
        return q * scale

    registered = torch.library.custom_op("longcontext_tests::attend", attend, mutates_args=())
    required = {"q": True, "scale": True, "causal": False}
    assert flash_attn_kernel._parameters(attend) == flash_attn_kernel._parameters(registered) == required
    assert flash_attn_kernel._call(registered, q=torch.ones(2), scale=3.0, other=1).tolist() == [3.0, 3.0]


def test_as_many_blocks_are_prepared_together_as_fit():
    """22 heads with 6 + 6 + 6 elements a token: 21,183 tokens fit, and these are 330 complete blocks."""
    q, v = (torch.empty(9, 1, 22, 6, device="meta") for _ in range(2))
    assert segments((q, q, v), (100, 30_000)) == [(100, 21_220), (21_220, 30_000)]
    many = (torch.empty(9, 2**12, 22, 6, device="meta"),) * 3
    assert segments(many, (0, 130)) == [(0, 64), (64, 128), (128, 130)]


def test_a_recurrence_begins_with_an_empty_state():
    torch.manual_seed(0)
    q, k = (torch.randn(5, 2, 2, 4).double() for _ in range(2))
    v, g, beta = torch.randn(5, 2, 4, 3).double(), -torch.rand(5, 2, 4).double(), torch.rand(5, 2, 4).double()
    for rule in ("gated_delta", "decay"):
        inputs = (RULES[rule], q, k, v, g, beta)
        for got, wanted in zip(recurrence(*inputs), recurrence(*inputs, state=torch.zeros(2, 4, 4, 3).double())):
            assert torch.equal(got, wanted) and got.abs().max() > 0
