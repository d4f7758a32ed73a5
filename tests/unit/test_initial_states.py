# SPDX-License-Identifier: Apache-2.0
"""Parts of a training step by themselves: wrappers, the optimizer's settings, FSDP's units, sums, profiler ranges."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.training import loss, step
from megatron.training.arguments.parser import parse
from megatron.training.model import fsdp, optimizer, weights
from tests.unit.test_refusals import GOOD, MOCK

DTYPES = {"": torch.float32, "--bf16": torch.bfloat16, "--fp16": torch.float16}


def config_of(flags: str) -> Any:
    return parse(f"{GOOD} {MOCK} {flags}".split(), world_size=1)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", DTYPES)
def test_what_cores_optimizer_sees(monkeypatch, stage: int, precision: str) -> None:
    """Under FSDP (ZeRO 2 and 3) all weights are fp32; losses of fp16 are then scaled by a class of ours."""
    config, seen = config_of(f"{precision} --zero-stage {stage}"), SimpleNamespace(scaled=[])
    part = SimpleNamespace(param_groups=[{"is_expert_parallel": False}])
    made = SimpleNamespace(chained_optimizers=[part], get_loss_scale=lambda: 1.0, scale_loss=object())
    monkeypatch.setattr(optimizer.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(optimizer, "get_standard_config_overrides", lambda _: None)
    monkeypatch.setattr(optimizer, "fill_states", lambda _: None)
    monkeypatch.setattr(optimizer, "scale_losses", lambda part, _: seen.scaled.append(part))
    monkeypatch.setattr(
        optimizer, "get_megatron_optimizer", lambda settings, *_, **more: setattr(seen, "settings", settings) or made
    )
    chunk = SimpleNamespace(module=SimpleNamespace(config=SimpleNamespace()), ddp_config=SimpleNamespace(), no_sync=1)
    optimizer.build_optimizer([chunk], config)
    under_fsdp, settings = stage >= 2, seen.settings
    assert (settings.fp16, settings.bf16) == (precision == "--fp16" and not under_fsdp,
                                              precision == "--bf16" and not under_fsdp)  # fmt: skip
    assert settings.params_dtype == (torch.float32 if under_fsdp else DTYPES[precision])
    assert settings.use_distributed_optimizer == (stage == 1)
    assert seen.scaled == [part] * (under_fsdp and precision == "--fp16")
    assert vars(chunk.ddp_config) == ({"use_megatron_fsdp": True} if under_fsdp else {})
    assert not hasattr(chunk.module.config, "no_sync_func")


@pytest.mark.parametrize("chunks", [1, 2])
def test_gradients_that_are_reduced_during_the_backward_pass_wait_for_the_last_micro_batch(monkeypatch, chunks) -> None:
    config = config_of("--overlap-grad-reduce")
    made = SimpleNamespace(param_groups=[], get_loss_scale=lambda: 4.0)
    monkeypatch.setattr(optimizer.dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(optimizer, "get_standard_config_overrides", lambda _: None)
    monkeypatch.setattr(optimizer, "fill_states", lambda _: None)
    monkeypatch.setattr(optimizer, "get_megatron_optimizer", lambda *_, **more: made)
    core, number = SimpleNamespace(), range(chunks)
    optimizer.build_optimizer([SimpleNamespace(module=SimpleNamespace(config=core), no_sync=n) for n in number], config)
    assert core.no_sync_func == (0 if chunks == 1 else [0, 1]) and core.grad_scale_func(3.0) == 12.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("narrow", [False, True])
def test_how_chunks_are_wrapped(monkeypatch, stage: int, narrow: bool) -> None:
    config = config_of(f"--zero-stage {stage} --bf16" + " --grad-reduce-in-bf16" * narrow)
    monkeypatch.setattr(optimizer, "FullySharded", lambda chunk, config: ("fsdp", chunk))
    monkeypatch.setattr(optimizer, "in_compute_dtype", lambda chunk, config: chunk)
    monkeypatch.setattr(
        optimizer, "DistributedDataParallel", lambda core, settings, chunk, **more: (settings, chunk, more)
    )
    chunks = [SimpleNamespace(config=None) for _ in range(3)]
    wrapped = optimizer.wrap_for_data_parallelism(chunks, config)
    if stage >= 2:
        assert wrapped == [("fsdp", chunk) for chunk in chunks]
        return
    assert [chunk for _, chunk, _ in wrapped] == chunks
    assert [more for *_, more in wrapped] == [{"disable_bucketing": index > 0} for index in range(3)]
    settings = wrapped[0][0]
    assert settings.grad_reduce_in_fp32 is not narrow and settings.use_distributed_optimizer == (stage == 1)


class Chunk(nn.Module):
    """A model of two layers and one of multi-token prediction."""

    def __init__(self, tied: bool, loss_chunks: int, streamed: bool, ahead: bool) -> None:
        super().__init__()
        self.decoder, self.embedding = nn.Module(), nn.Linear(1, 1)
        self.decoder.layers = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.output_layer, self.mtp = nn.Linear(1, 1), nn.Module()
        self.mtp.layers = nn.ModuleList([nn.Module()])
        self.mtp.layers[0].transformer_layer = nn.Linear(1, 1)
        self.share_embeddings_and_output_weights, self.loss_chunks, self.mtp_process = tied, loss_chunks, ahead
        self.chunks = SimpleNamespace(streamed=streamed)


@pytest.mark.parametrize(
    "tied, loss_chunks, streamed, ahead, units",
    [
        (False, 0, False, True, ["0", "1", "mtp", "embedding", "output", "root"]),
        (False, 0, False, False, ["0", "1", "embedding", "output", "root"]),
        (True, 0, False, False, ["0", "1", "root"]),
        (False, 0, True, False, ["0", "1", "output", "root"]),
        (False, 4, False, False, ["0", "1", "embedding", "root"]),
        (True, 4, True, False, ["0", "1", "root"]),
    ],
)
@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --grad-reduce-in-bf16"])
def test_what_fsdp_gathers_at_once(monkeypatch, tied, loss_chunks, streamed, ahead, units, flags) -> None:
    made, policies = [], []

    def fully_shard(module: nn.Module, **settings: Any) -> None:
        made.append(module)
        policies.append(settings["mp_policy"])
        for name in ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms", "set_unshard_in_backward"):
            setattr(module, name, lambda _: None)

    monkeypatch.setattr(fsdp, "fully_shard", fully_shard)
    monkeypatch.setattr(fsdp, "get_data_parallel_group", lambda **_: None)
    monkeypatch.setattr(fsdp.dist, "get_process_group_ranks", lambda _: [0])
    monkeypatch.setattr(fsdp, "DeviceMesh", SimpleNamespace(from_group=lambda *_: None))
    chunk = Chunk(tied, loss_chunks, streamed, ahead)
    fsdp.shard(chunk, config_of(f"--zero-stage 3 {flags}"))
    names = {id(chunk): "root", id(chunk.embedding): "embedding", id(chunk.output_layer): "output",
             id(chunk.mtp.layers[0].transformer_layer): "mtp",
             **{id(layer): str(number) for number, layer in enumerate(chunk.decoder.layers)}}  # fmt: skip
    assert [names[id(module)] for module in made] == units
    narrow = "--bf16" in flags
    for policy in policies:
        assert policy.param_dtype == (torch.bfloat16 if narrow else None)
        assert policy.reduce_dtype == (torch.float32 if flags == "--bf16" else None)


def test_reports_are_summed_in_double_precision_over_the_ranks(monkeypatch) -> None:
    reduced = []
    monkeypatch.setattr(loss, "get_data_parallel_group", lambda **_: "group")
    monkeypatch.setattr(loss.dist, "all_reduce", lambda x, group: reduced.append(group))
    grid = SimpleNamespace(pipeline=SimpleNamespace(size=1))
    runtime = SimpleNamespace(device=torch.device("cpu"), grid=grid)
    total = loss.sum_of_reports([torch.tensor([2.0**25, 1.0]), torch.tensor([1.0, 1.0])], (2,), runtime)
    assert total.tolist() == [2.0**25 + 1, 2.0] and reduced == ["group"]


def test_states_that_an_optimizer_begins_with() -> None:
    for make, names in (
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.AdamW(p, 0.1), {"step", "exp_avg", "exp_avg_sq"}),
    ):
        weight = nn.Parameter(torch.ones(3))
        inner = make([weight])
        optimizer.fill_states(SimpleNamespace(optimizer=inner))
        assert inner.state[weight].keys() == names and not any(state.any() for state in inner.state[weight].values())
    other = SimpleNamespace(optimizer=torch.optim.Adadelta([nn.Parameter(torch.ones(3))]))  # makes its own
    optimizer.fill_states(other)
    assert not other.optimizer.state and not hasattr(other, "init_state_fn")


def test_phases_have_ranges_while_torch_profiles() -> None:
    marked: list[str] = []
    assert step.with_profiler_ranges(marked.append) == marked.append and step.with_profiler_ranges(None) is None
    with torch.profiler.profile() as profile:
        for mark in (step.with_profiler_ranges(marked.append), step.with_profiler_ranges(None)):
            mark("a phase")
    assert marked == ["a phase"] and sum(event.name == "a phase" for event in profile.events()) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_streamed_hidden_states_have_one_backward_thread(monkeypatch, streamed: bool) -> None:
    threads, several = [], torch.autograd.is_multithreading_enabled
    monkeypatch.setattr(step, "get_forward_backward_func", lambda: lambda **_: threads.append(several()))
    config = config_of("--fpdt --fpdt-chunk-size 32" + " --fpdt-stream-hidden" * streamed)
    step.run_schedule(None, [None], None, config, 1, forward_only=True)
    assert threads == [not streamed]


def test_a_seed_gives_the_same_weights_in_all_versions() -> None:
    """A checkpoint may be continued, and a table reproduced, with another version."""
    generator = weights.generator_of("1/decoder.final", torch.device("cpu"))
    digits = hashlib.sha256(b"1/decoder.final").hexdigest()[:14]
    assert generator.initial_seed() == int("".join(digits[at : at + 2] for at in range(12, -1, -2)), 16)
    assert torch.randn(3, generator=weights.generator_of("1", torch.device("cpu"))).shape == (3,)


@pytest.mark.parametrize(
    "marks, shares", [({}, (1,)), ({"partition_stride": 2}, (1, 1)),
                      ({"partition_sections": (3, 1), "partition_stride": 1}, (3, 1))]
)  # fmt: skip
def test_shares_of_a_parameter_that_tp_splits(marks: dict[str, Any], shares: tuple[int, ...]) -> None:
    assert weights.sections(SimpleNamespace(**marks)) == shares
    x = torch.arange(8.0)
    assert [len(part) for part in weights.in_sections(x, 0, shares)] == [8 * share // sum(shares) for share in shares]


@pytest.mark.parametrize("bad", ["", "the loss is nan"])
@pytest.mark.parametrize("flags, moves", [
    ("", False), ("--moe-router-enable-expert-bias --moe-router-score-function sigmoid", True),
    ("--moe-router-enable-expert-bias --moe-router-score-function sigmoid --lora-rank 4", False),
])  # fmt: skip
def test_what_follows_an_update(monkeypatch, flags: str, moves: bool, bad: str) -> None:
    """Biases of the router are state of the model: a skipped step and adapters leave them as they are."""
    config, moved, steps = config_of(f"--num-experts 4 --moe-router-topk 2 {flags}"), [], []
    monkeypatch.setattr(step, "run_schedule", lambda *_, **more: [])
    monkeypatch.setattr(step, "mean_loss", lambda *_: (2.0, 8))
    monkeypatch.setattr(step, "losses_ahead", lambda *_: None)
    monkeypatch.setattr(step, "take_load", lambda *_: "table")
    monkeypatch.setattr(step, "load_of", lambda *_: None)
    monkeypatch.setattr(step, "move_biases", lambda chunks, table, _: moved.append(table))
    monkeypatch.setattr(step, "step_if", lambda optimizer, allowed: (allowed(1.5), 1.5, None))
    runtime = SimpleNamespace(device="cpu", grid=SimpleNamespace(data=SimpleNamespace(size=3)))
    watch = SimpleNamespace(judge=lambda *_: bad, skips=True)
    result = step.train_step(
        runtime, [], SimpleNamespace(zero_grad=lambda: None), SimpleNamespace(step=steps.append), [], config, 2,
        watch=watch,
    )  # fmt: skip
    assert (result.skipped, result.bad, result.grad_norm) == (bool(bad), bad, 1.5)
    assert moved == ["table"] * (moves and not bad)
    assert steps == [] if bad else steps == [2 * config.data.micro_batch_size * 3]
