# SPDX-License-Identifier: Apache-2.0
"""--dry-run: its output, extrapolation from few layers, and refusals. Its equality with a real run is tested with
real processes, in tests/distributed/test_dry_run.py."""

import gc
import json
from dataclasses import replace

import pytest
import torch

from megatron.formulas.host_bytes import Loads, forward_loads
from megatron.simulator.command import simulate
from megatron.simulator.cost.trace import HostCopy, Phase, Transfer, Wait
from megatron.simulator.dry_run.allocation.reserved import Reserved, runtime_memory
from megatron.simulator.dry_run.dry_run import DryRun, Figures, RankReport, dry_run, ranks_of, run_job, too_full
from megatron.simulator.dry_run.dry_run_report import verdict
from megatron.simulator.dry_run.one_rank import run_rank
from megatron.simulator.dry_run.replay import replay
from megatron.simulator.machines.machine import Calibration, Machine
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.pretrain import main
from megatron.training.report.memory_picture import readable
from tests.distributed.flags import LLAMA

TINY = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-3 --mock-data --vocab-size 300"
)
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def config_of(flags, ranks):
    return parse(f"{TINY} {flags}".split(), LLAMA, ranks)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, "--ulysses-parallel-size 2 --zero-stage 1 --bf16 --global-batch-size 2"),
        pytest.param(
            2,
            f"--fpdt --fpdt-chunk-size 128 --bf16 --offload-checkpoints --zero-stage 3 {RECOMPUTE}",
            marks=pytest.mark.full,
        ),
        pytest.param(2, f"{RECOMPUTE} --tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.full),
        pytest.param(1, f"{RECOMPUTE[:-1]}2 --bf16 --num-layers 20", marks=pytest.mark.full),
        pytest.param(
            2,
            "--ring-parallel-size 2 --experimental-attention-variant gated_delta_net --linear-attention-freq [1,0]*10 "
            "--linear-num-key-heads 2 --linear-num-value-heads 4 --num-layers 20",
            marks=pytest.mark.full,
        ),
    ],
)
def test_results_of_a_few_layers_equal_those_of_all(ranks, flags):
    machine = replace(load("A100-80G"), dispatch=0.0)  # or launches by the host would dominate
    few, every = (
        dry_run(config_of(f"--num-layers 10 {flags}", ranks), ranks, machine, vocab_size=301, every_layer=every)
        for every in (False, True)
    )
    for a, b in zip(few.ranks, every.ranks):
        assert a.layers[1] < a.layers[0] == b.layers[1]
        assert a.figures.device_peak == pytest.approx(b.figures.device_peak, rel=2e-3)
        assert a.figures.host_peak == b.figures.host_peak
        assert a.figures.flops == pytest.approx(b.figures.flops, rel=1e-12)
        assert a.figures.communication == pytest.approx(b.figures.communication, rel=2e-3)
        assert a.figures.copies == b.figures.copies
        # ZeRO 1's optimizer updates a rank's part of every parameter; the number of these parts depends on the layers.
        passes, all_passes = a.figures.seconds["passes"], b.figures.seconds["passes"]
        assert passes == pytest.approx(all_passes, rel=2e-3)
    assert few.predicted_seconds == pytest.approx(every.predicted_seconds, rel=2e-2)


@pytest.mark.full
def test_if_one_number_of_layers_needs_every_micro_batch_both_run_them_all(monkeypatch):
    from megatron.simulator.dry_run import dry_run as module

    run_rank = module.run_rank

    def fails_with_more_layers(config, *args, stretch, **options):
        if stretch and config.model.num_layers == module.FEW[1]:
            raise module.Unsteady("the micro-batches do not repeat")
        return run_rank(config, *args, stretch=stretch, **options)

    monkeypatch.setattr(module, "run_rank", fails_with_more_layers)
    config = config_of("--num-layers 10 --global-batch-size 6", 1)
    result = dry_run(config, 1, load("A100-80G"), vocab_size=301)
    assert result.ranks[0].micro_batches == (6, 6) and len(result.ranks[0].program.forward) == 6
    assert result.predicted_seconds > 0


def test_each_kind_of_stage_and_the_busiest_rank_of_a_ring():
    pipeline = config_of("--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2", 16)
    assert list(ranks_of(pipeline, 16)) == [(0, "first"), (8, "middle"), (12, "last")]
    ring = config_of("--ring-parallel-size 4 --tensor-model-parallel-size 2 --context-parallel-balance contiguous", 8)
    assert list(ranks_of(ring, 8)) == [(6, "first")]
    # A zigzag ring's first rank has fewer keys within a window; with FPDT its neighbour uses more host memory.
    zigzag = "--ring-parallel-size 4 --ulysses-parallel-size 2 --context-parallel-balance zigzag"
    assert list(ranks_of(config_of(zigzag, 8), 8)) == [(0, "first")]
    assert list(ranks_of(config_of(zigzag + " --window-size 7,0", 8), 8)) == [(2, "first")]
    assert list(ranks_of(config_of(zigzag + " --fpdt --fpdt-chunk-size 16", 8), 8)) == [(0, "first"), (2, "first")]


def test_stages_of_unequal_depth():
    flags = "--num-layers 4 --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1"
    result = dry_run(config_of(flags, 2), 2, load("H100-80G"), vocab_size=301)
    assert [report.layers for report in result.ranks] == [(1, 1), (3, 3)]
    first, last = (report.figures.peaks["optimizer"]["parameters"] for report in result.ranks)
    layer = 4 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert last - first == 2 * layer + 4 * 64  # and the final norm


def test_a_gpu_copies_on_separate_streams():
    config = config_of(f"--fpdt --fpdt-chunk-size 64 --bf16 {RECOMPUTE} --num-layers 1 --global-batch-size 1", 1)
    gpu, cpu = (run_rank(config, 1, 0, 301, machine=machine) for machine in (load("A100-80G"), None))
    copies, on_cpu = ([e for e in x.trace.events if isinstance(e, HostCopy)] for x in (gpu, cpu))
    waited = {ticket for e in gpu.trace.events if isinstance(e, Wait) for ticket in e.tickets}
    assert sum(e.bytes for e in copies) == sum(e.bytes for e in on_cpu) > 0
    assert all(e.ticket is None for e in on_cpu)
    assert {e.ticket for e in copies if e.direction == "to_device"} <= waited


def test_layer_inputs_leave_the_device_before_the_backward_pass():
    flags = f"--fpdt --fpdt-chunk-size 512 --no-fpdt-offload --bf16 {RECOMPUTE} --seq-length 1024 --num-layers 4"
    flags += " --max-position-embeddings 1024 --global-batch-size 1"
    machine = load("A100-80G")
    on_device, in_host = (
        run_rank(config_of(f"{flags} {more}", 1), 1, 0, 301, machine=machine) for more in ("", "--offload-checkpoints")
    )
    hidden = 1024 * 64 * 2
    # Of four inputs, the current and the prefetched one are on the device, the other two are not.
    assert on_device.device_peak - in_host.device_peak >= 2 * hidden
    assert in_host.host_peak - on_device.host_peak == 4 * hidden


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_a_ring_moves_keys_and_neither_queries_nor_sums(balance):
    """docs/inside/host-copies.md, "What is copied", describes this for a forward pass of FPDT."""
    flags = f"--fpdt --fpdt-chunk-size 64 --ring-parallel-size 2 --context-parallel-balance {balance} --bf16"
    config = config_of(f"{flags} --num-layers 1 --global-batch-size 1 --group-query-attention --num-query-groups 2", 2)
    events = run_rank(config, 2, 1, 301, machine=load("A100-80G")).trace.events
    forward = events[: next(i for i, e in enumerate(events) if isinstance(e, Phase) and e.name == "backward")]
    sent, loaded = (
        sum(e.bytes for e in forward if isinstance(e, HostCopy) and e.direction == direction)
        for direction in ("to_host", "to_device")
    )
    q, kv, lse = 32 * 8 * 8 * 2, 2 * 32 * 2 * 8 * 2, 32 * 8 * 4
    assert sent == 4 * (2 * q + kv + lse)
    loads = forward_loads(4, 2, early_half=balance == "zigzag")
    assert loads == (Loads(8, 2) if balance == "zigzag" else Loads(12, 3))
    assert loaded == loads.keys * kv + loads.queries * q


@pytest.mark.full
def test_states_in_chunks_need_no_more_device_memory_for_twice_the_length():
    flags = (
        "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,1] --linear-num-key-heads 2 "
        "--linear-num-value-heads 4 --linear-key-head-dim 16 --linear-value-head-dim 32 --num-layers 2 --bf16 --fpdt "
        f"--fpdt-chunk-size 512 --fpdt-stream-hidden --global-batch-size 1 {RECOMPUTE}"
    )
    peaks = []
    for length in (2048, 4096):
        config = config_of(f"{flags} --seq-length {length} --max-position-embeddings {length}", 1)
        peaks.append(run_rank(config, 1, 0, 512).device_peak)
    tokens, states = 18 * 2048, 4 * 2 * 4 * 4 * 16 * 32  # of four more chunks: ids, labels and masks; states
    assert 0 < peaks[1] - peaks[0] < tokens + states + 65536


def test_weights_arrive_while_the_previous_layer_computes():
    """Long compute hides FSDP's transfers, except the first gather and the last reduction."""
    wide = "--hidden-size 1024 --num-attention-heads 8 --seq-length 8192 --max-position-embeddings 8192 --num-layers 4"
    config = config_of(f"{wide} --zero-stage 3 --bf16 --ulysses-parallel-size 4 --global-batch-size 1", 4)
    machine = load("A100-80G")
    trace = run_rank(config, 4, 0, 301, machine=machine).trace
    replayed = replay(trace, replace(machine, calibration=Calibration()))
    assert 0 < replayed.exposed["dp"] < 0.5 * replayed.busy["dp"]
    tickets = [e.ticket for e in trace.events if isinstance(e, Transfer) and e.axis == "dp" and e.ticket]
    waited = [ticket for e in trace.events if isinstance(e, Wait) for ticket in e.tickets]
    assert len(tickets) == len(set(tickets)) and set(tickets) <= set(waited)


@pytest.mark.parametrize("data", [2, pytest.param(128, marks=pytest.mark.full)])
@pytest.mark.lab
def test_a_world_of_16384_ranks(data):
    """core lists the ranks of every group on every rank; the usual run tests only 256 ranks."""
    world = 128 * data
    flags = "--tensor-model-parallel-size 4 --sequence-parallel --ulysses-parallel-size 4 --ring-parallel-size 2"
    flags += " --pipeline-model-parallel-size 4 --bf16 --zero-stage 1 --num-attention-heads 64 --hidden-size 512"
    flags += f" --seq-length 1024 --max-position-embeddings 1024 --global-batch-size {2 * data}"
    config = parse(f"{TINY} {flags}".split(), LLAMA, world)
    result = dry_run(config, world, load("H100-80G"), vocab_size=301)
    assert [report.rank for report in result.ranks] == [0, world // 2, world * 3 // 4]
    assert result.fits and result.predicted_seconds > 0
    assert all(report.figures.communication[axis] > 0 for report in result.ranks for axis in ("tp", "ulysses", "ring"))


def test_the_verdict_says_which_setting_of_the_allocator_fits() -> None:
    """20 GiB allocated, 30 or 22 reserved; with 25 GiB, the machine file's constant would leave 5 to spare."""
    config, gib = parse(f"{TINY} --seq-length 64 --max-position-embeddings 64 --bf16".split(), LLAMA, 1), 2**30
    machine = replace(load("A100-80G"), memory=25 * gib, reserved=0)
    peaks = {"forward": {"activations": 20 * gib}}
    reserved = {"default": 30.0 * gib, "expandable_segments": 22.0 * gib}
    one = RankReport(0, "first", (1, 1), (1, 1), Figures(peaks, 0, 0, {}, {}, {}, {}, {}), None, None)
    one = replace(one, reserved=Reserved(reserved))

    def outcome(machine: Machine, report: RankReport) -> tuple[list[str], list[str]]:
        reasons = list(too_full(config, [report], 1, machine))
        return reasons, verdict(DryRun(config, 1, machine, [report], 1.0, 0.5, not reasons, tuple(reasons)))

    own = runtime_memory(config, 1, machine).outside_allocator
    reasons, (default, expandable) = outcome(machine, one)
    assert not reasons
    assert "default allocator the step does not fit: 5.5 GiB of device memory are missing" in default
    assert f"expandable_segments:True the step fits, with {readable(3 * gib - own)} of device memory" in expandable
    (reason,), lines = outcome(replace(machine, memory=21 * gib), one)
    assert "needs 22.5 GiB of device memory: 20.0 allocated" in reason and not any(" fits" in line for line in lines)
    reasons, (line,) = outcome(machine, replace(one, reserved=Reserved()))
    assert not reasons and line == "the step fits, with 5.0 GiB of device memory to spare"


def test_the_program_writes_its_results(tmp_path, capsys):
    path = tmp_path / "out" / "plan.json"
    flags = "--model llama3-8b --num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --seq-length 1024 --dry-run "
    flags += f"--world-size 4 --ulysses-parallel-size 4 --gpu A100-80G --bf16 --dry-run-json {path}"
    assert main(flags.split(), LLAMA, simulate) == 0
    output = capsys.readouterr().out
    assert "memory of a rank" in output and "sent over ulysses" in output and "the step fits" in output
    result = json.loads(path.read_text())
    (rank,) = result["ranks"]
    assert set(rank["communication_bytes"]) == {"tp", "ulysses", "ring", "cp", "dp", "ep", "pp", "other"}
    assert rank["device_peak_bytes"] == sum(rank["device_peak_by_kind"].values())
    assert result["fits"] is True and 0 < result["mfu"] < 1 and result["predicted_ms"] > 0
    made = {"plan.json", "plan_memory.png", "plan_time_rank0.png", "plan_trace.json.gz"}
    assert made == {file.name for file in path.parent.iterdir()}


def test_a_full_disk_is_reported_after_the_tables(tmp_path, capsys, monkeypatch):
    from megatron.simulator.dry_run import dry_run_report as dry_run_report

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dry_run_report, "write", fail)
    assert main(f"{TINY} --num-layers 1 --dry-run --dry-run-json {tmp_path / 'x.json'}".split(), LLAMA, simulate) == 1
    output = capsys.readouterr()
    assert "memory of a rank" in output.out and output.err.endswith("No space left on device\n")


@pytest.mark.full
def test_workers_are_spawned_where_a_fork_could_not_train(monkeypatch):
    """Once PyTorch has started threads for its devices, a fork's backward pass raises an error."""
    config, asked = config_of("--num-layers 12", 1), []
    forked = dry_run(config, 1, vocab_size=301, workers=2)
    monkeypatch.setattr("megatron.simulator.dry_run.dry_run.forks_can_train", lambda: asked.append(1))
    spawned = dry_run(config, 1, vocab_size=301, workers=2)
    assert asked and spawned.ranks[0].figures == forked.ranks[0].figures


def test_what_does_not_fit_is_reported(capsys):
    flags = "--model llama3-70b --num-layers 16 --seq-length 2048 --dry-run --world-size 1 --gpu A100-40G --bf16"
    assert main(flags.split(), LLAMA, simulate) == 1
    assert "does not fit: rank 0 needs" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_predicted(tmp_path, capsys):
    path = tmp_path / "cpu.json"
    assert main(f"{TINY} --dry-run --dry-run-json {path}".split(), LLAMA, simulate) == 0
    result = json.loads(path.read_text())
    assert (result["predicted_ms"], result["mfu"], result["fits"]) == (None, None, None)
    assert not list(tmp_path.glob("*_time_*"))


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        ("--world-size 4", "--world-size 4, and 1 process was started: start that many, or add --dry-run"),
        ("--gpu A100-80G", "--gpu does nothing without --dry-run"),
        ("--dry-run --gpu A1000", "A100-80G"),
        (
            "--dry-run --world-size 3 --ulysses-parallel-size 2 --global-batch-size 6",
            "2 ranks does not divide the 3 processes",
        ),
        ("--dry-run --world-size 0", "--world-size 0"),
        ("--dry-run --gpu A100-80G --bf16 --attention-kernel cpu", "--attention-kernel cpu: needs tensors on the CPU"),
        ("--dry-run --dry-run-json /proc/nothing/x.json", "--dry-run-json /proc/nothing/x.json cannot be written"),
    ],
)
def test_refusals(flags, output, capsys):
    assert main(f"{TINY} {flags}".split(), LLAMA, simulate) == 2
    error = capsys.readouterr().err
    assert output in error and error.count("\n") == 1


PIPELINE = "--pipeline-model-parallel-size 2"
MICRO_BATCHES = {
    "one stage": (1, 8, "--num-layers 1 --bf16 --zero-stage 0"),
    "ZeRO 1, overlapped": (4, 16,
     "--ulysses-parallel-size 2 --num-layers 2 --zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "ZeRO 3 with recompute": (2, 6, f"--num-layers 2 --zero-stage 3 --bf16 --ring-parallel-size 2 {RECOMPUTE}"),
    "pipeline": (4, 12, "--num-layers 4 --pipeline-model-parallel-size 4 --zero-stage 1 --bf16"),
    "virtual stages": (2, 12, f"--num-layers 4 {PIPELINE} --num-virtual-stages-per-pipeline-rank 2"),
    "TP on virtual stages": (
        4,
        12,
        f"--num-layers 6 {PIPELINE} --num-virtual-stages-per-pipeline-rank 3 --tensor-model-parallel-size 2 "
        "--sequence-parallel --bf16 --zero-stage 1 --overlap-grad-reduce --overlap-param-gather",
    ),
    "FPDT": (
        2,
        6,
        f"--num-layers 1 --fpdt --fpdt-chunk-size 128 --bf16 --offload-checkpoints --ulysses-parallel-size 2 "
        f"{RECOMPUTE}",
    ),
    "dropout": (2, 6,
     f"--num-layers 1 --hidden-dropout 0.1 --attention-dropout 0.1 --ring-parallel-size 2 {RECOMPUTE}"),
    "FPDT in a pipeline": (4, 6,
     f"--num-layers 2 {PIPELINE} --ring-parallel-size 2 --fpdt --fpdt-chunk-size 128 --bf16 {RECOMPUTE}"),
}  # fmt: skip
USUAL = {"virtual stages": 1}


@pytest.mark.parametrize(
    ("name", "gpu", "rank"),
    [
        pytest.param(name, gpu, rank, marks=() if gpu and USUAL.get(name) == rank else pytest.mark.full)
        for name, (ranks, _, flags) in MICRO_BATCHES.items()
        for rank in (range(0, ranks, ranks // 2) if PIPELINE in flags else range(ranks if "pipeline" in flags else 1))
        for gpu in ("H100-80G", None)
    ],
)
def test_results_of_a_few_micro_batches_equal_those_of_all(name, gpu, rank):
    ranks, batch, flags = MICRO_BATCHES[name]
    machine = gpu and load(gpu)
    if "--zero-stage 3" in flags:  # the first run adds a mesh of eight bytes to PyTorch's caches
        run_job((config_of(f"--global-batch-size 1 {flags}", ranks), ranks, rank, 301, machine, True))
    config = config_of(f"--global-batch-size {batch} {flags}", ranks)
    few, every = (run_job((config, ranks, rank, 301, machine, every)) for every in (False, True))
    assert few[1][1] < few[1][0] == every[1][1] == every[1][0]
    for field in ("peaks", "host_peak", "flops", "communication", "copies"):
        assert getattr(few[0], field) == getattr(every[0], field)
    for field in ("seconds", "exposed", "busy"):
        assert getattr(few[0], field) == pytest.approx(getattr(every[0], field), rel=1e-9, abs=1e-12)


def test_other_memory_of_the_process_is_not_counted():
    flags = "--num-layers 1 --global-batch-size 1"
    held, peaks = [], []
    for size in (0, 10**6):
        held.append(torch.zeros(size))
        peaks.append(run_job((config_of(flags, 1), 1, 0, 301, None, False))[0].peaks)
    assert peaks[0] == peaks[1]


def test_allocations_come_in_the_same_order_in_every_process(monkeypatch):
    """The garbage collector lists tensors from before the step in any order."""
    flags = "--num-layers 1 --global-batch-size 2 --bf16 --zero-stage 3 --ulysses-parallel-size 2"
    config, objects = config_of(flags, 2), gc.get_objects
    result = []
    for order in (1, -1):
        monkeypatch.setattr(gc, "get_objects", lambda order=order: objects()[::order])
        result.append(run_rank(config, 2, 0, 301, machine=load("A100-80G")).allocations)
    assert result[0] == result[1]


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_a_hop_of_a_ring_takes_as_long_as_its_larger_direction(balance):
    """On a ring of two ranks, each sends while it receives, and the two messages have different sizes."""
    flags = f"--ring-parallel-size 2 --context-parallel-balance {balance} --num-layers 1 --global-batch-size 1"
    sent, arrived = [], []
    for rank in range(2):
        trace = run_rank(config_of(flags, 2), 2, rank, 301, machine=load("A100-80G")).trace
        hops = [event for event in trace.events if isinstance(event, Transfer) and event.axis == "ring"]
        waited = {ticket for event in trace.events if isinstance(event, Wait) for ticket in event.tickets}
        assert {hop.ticket for hop in hops} <= waited
        sent.append([hop.bytes for hop in hops])
        arrived.append([hop.bytes + hop.excess for hop in hops])
    assert len(sent[0]) == 3  # keys forward, keys backward, gradients of keys
    assert sent[0] != sent[1]
    assert arrived[0] == arrived[1] == list(map(max, *sent))
