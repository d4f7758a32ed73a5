# SPDX-License-Identifier: Apache-2.0
"""Tools that draw or tabulate runs, tiles, memory traffic and traces."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron.context_parallel as cp
from megatron.simulator.cost.kinds.attention_operations import UNFUSED_ROTARY_BYTES
from megatron.simulator.dry_run.traffic import REST, layer_traffic
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.settings.models import LLAMA_DEFAULTS
from tools import compare_trace, plot_tiles, traffic
from tools.merged_trace import merged
from tools.plot_run import first_and_last, loads, main, read_rows, smooth, summary
from tools.profiled_trace import collective, measured
from tools.tile_drawing import document_ends
from tools.tile_shapes import Outline, shapes
from tools.trace_alignment import compare, predicted, read


def write_log(path, losses):
    row = {"tokens": 100, "iteration_ms": 10.0, "tokens_per_second": 1e4, "mfu": 0.5, "device_peak_bytes": 2**20}
    rows = [{"iteration": index + 1, "lm_loss": loss, **row} for index, loss in enumerate(losses)]
    rows[-1] |= {"validation_loss": 1.25, "test_loss": 1.5}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 99, "lm')
    return path


def test_a_torn_line_is_left_out_and_means_are_right(tmp_path):
    rows = read_rows(write_log(tmp_path / "log.jsonl", [9, 7, 5, 4, 3, 2, 1]))
    assert len(rows) == 7
    assert first_and_last(rows) == (9, 3)
    assert smooth([1, 2, 3], window=2) == [1, 1.5, 2.5]
    table = dict(summary(rows))
    assert table["validation loss"] == "1.250" and table["test loss"] == "1.500" and table["training tokens"] == "700"


def test_the_share_of_time_without_data(tmp_path):
    rows = read_rows(write_log(tmp_path / "log.jsonl", [9, 7, 5]))
    assert "waiting for data (median)" not in dict(summary(rows))
    table = dict(summary([row | {"data_wait_ms": 2.5} for row in rows]))
    assert table["waiting for data (median)"] == "25.0 % of it"


def test_steps_without_a_loss_are_left_out_and_other_files_refused(tmp_path, capsys):
    assert len(read_rows(write_log(tmp_path / "log.jsonl", [9, None, 5, 4]))) == 3
    for text in ('{"text": "abc"}', "[1]", "12", '{"iteration": "x"}'):
        (tmp_path / "other").write_text(text)
        assert main([str(tmp_path / "other")]) == 2
        assert "is not a log of --log-jsonl" in capsys.readouterr().err


def test_the_load_of_experts_is_drawn(tmp_path, capsys):
    log = write_log(tmp_path / "log.jsonl", [9, 7, 5])
    words = [str(log), "--output", str(tmp_path / "loss.png"), "--experts", str(tmp_path / "new" / "experts.png")]
    assert main(words) == 2
    assert "the log has no tokens_per_expert" in capsys.readouterr().err
    rows = read_rows(log)
    counts = [[[30, 10], [20, 20]], [[40, 0], [10, 30]], [[20, 20], [0, 0]]]
    given = [row | {"tokens_per_expert": step} for row, step in zip(rows, counts)]
    assert loads(given) == [[[1.5, 0.5], [1, 1]], [[2, 0], [0.5, 1.5]], [[1, 1], [0, 0]]]
    log.write_text("".join(json.dumps(row) + "\n" for row in given))
    assert main(words) == 0 and (tmp_path / "new" / "experts.png").read_bytes().startswith(b"\x89PNG")
    for wrong in ([[1], [2]], [[1, 2], [3]], [["1", 2], [3, 4]], 5, None, []):
        with pytest.raises(ValueError, match="--experts: "):
            loads([*given, rows[0] | {"tokens_per_expert": wrong}])


@pytest.mark.parametrize("fell_by, code", [("5.9", 0), ("6.1", 1)])
def test_the_picture_is_drawn_and_the_fall_is_checked(tmp_path, capsys, fell_by, code):
    log = write_log(tmp_path / "log.jsonl", [9, 7, 5, 4, 3, 2, 1])
    picture = tmp_path / "new" / "loss.png"
    assert main([str(log), "--output", str(picture), "--resumed", "3", "--fell-by", fell_by]) == code
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "6.000 lower" in capsys.readouterr().out


def test_an_empty_log_is_refused(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text("")
    assert main([str(tmp_path / "log.jsonl")]) == 2
    assert "holds no training step" in capsys.readouterr().err


# Pictures of tiles show each allowed pair exactly once.


LENGTH = 120
ENDS = document_ends(LENGTH)
BLOCKS = cp.BlockSparse(16, cp.BigBirdBlocks(1, 1, 2), LENGTH)
MASKS = {
    "causal": cp.Causal(),
    "full": cp.Full(),
    "window": cp.Window(39),
    "both sides": cp.Window(20, 30, 5),
    "narrow window": cp.Window(9),
    "documents": cp.Documents(ENDS),
    "window in documents": cp.Documents(ENDS, cp.Window(39)),
    "blocks": BLOCKS,
    "function": cp.MaskFunction(lambda q, k: (q - k) % 24 < 12, cp.Causal()),
    "function in blocks": cp.MaskFunction(lambda q, k: (q + k) % 5 < 3, BLOCKS),
}
LAYOUTS = [("zigzag", 4, 1), ("contiguous", 3, 1), ("documents", 4, 1), ("zigzag", 2, 3), ("documents", 1, 5)]


def area(outline: Outline) -> float:
    """The number of pairs within an outline."""
    ends = zip(outline, [*outline[1:], outline[0]])
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in ends)) / 2


def inside(outline) -> torch.Tensor:
    """Boolean [queries, keys]: the pairs within an outline, found by counting crossings of its vertical edges."""
    crossings = torch.zeros(LENGTH, LENGTH, dtype=torch.int)
    for (x0, y0), (x1, y1) in zip(outline, [*outline[1:], outline[0]]):
        assert x0 == x1 or y0 == y1
        crossings[min(y0, y1) : max(y0, y1), x0:] += 1
    return crossings % 2 == 1


@pytest.mark.parametrize("balance, ring, chunks", LAYOUTS)
@pytest.mark.parametrize("name", MASKS)
def test_the_picture_shows_the_pairs_that_the_mask_allows(name, balance, ring, chunks):
    mask, ends = MASKS[name], ENDS if balance == "documents" else ()
    layout = cp.SequenceLayout(LENGTH, cp.abstract_grid(ring=ring), balance, chunks=chunks, document_ends=ends)
    drawn = torch.zeros(LENGTH, LENGTH, dtype=torch.int)
    queries = torch.zeros(LENGTH, dtype=torch.bool)
    for rank in range(ring):
        queries[:] = False
        for start, stop in layout.ring_spans(rank):
            queries[start:stop] = True
        for shape in shapes(layout, mask, rank):
            assert sum(map(area, shape.outlines)) == shape.tile.pairs
            for outline in shape.allowed:
                pairs = inside(outline)
                assert int(pairs.sum()) == area(outline) and not pairs[~queries].any()
                drawn += pairs
    at = torch.arange(LENGTH)
    assert torch.equal(drawn, mask.allowed(at[:, None], at[None]).int())


@pytest.mark.parametrize(
    "options",
    [
        "--show gallery --ring 2 --seq-length 128",
        "--mask document --window-size 39,0 --chunks 3 --ring 2 --seq-length 192",
        "--show layout --balance documents --document-ends 30 64 --seq-length 64",
    ],
)
@pytest.mark.usual(2)
def test_masks_are_drawn(options, tmp_path):
    output = tmp_path / "new" / "picture.png"
    assert plot_tiles.main([*options.split(), "--output", str(output)]) == 0
    assert 5000 < output.stat().st_size < 150_000


@pytest.mark.parametrize(
    "options, message",
    [
        ("--mask window", "needs --window-size"),
        ("--sparse-stride 4", "used only by --attention-mask block-sparse"),
        ("--mask function --mask-function none.py:f", "there is no file none.py"),
        ("--balance documents", "add --mask document"),
        ("--mask document --document-ends 5 --seq-length 64", "must end at 64"),
        ("--show ring --chunks 2", "--chunks has no effect with --show ring"),
        ("--show gallery --mask full", "--mask has no effect with --show gallery"),
    ],
)
def test_bad_options_are_refused(options, message, tmp_path, capsys):
    output = tmp_path / "picture.png"
    assert plot_tiles.main([*options.split(), "--output", str(output)]) == 2
    assert message in capsys.readouterr().err and not output.exists()


# Bytes that one layer's kernels read and write, counted by hand; and the tool that prints them.


WORDS = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 8 --group-query-attention "
WORDS += "--num-query-groups 4 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --bf16 "
WORDS += "--tokenizer-type NullTokenizer --vocab-size 300"
TOKENS, HIDDEN, FFN, HEADS, KV, SIZE = 256, 64, 160, 8, 4, 8
QKV = HEADS * SIZE + 2 * KV * SIZE


def counted(more: str, gpus: int = 1, **options):
    config = parse(f"{WORDS} {more} --dry-run --world-size {gpus}".split(), LLAMA_DEFAULTS, gpus)
    return layer_traffic(config, gpus, 0, 301, load("A100-80G"), **options)


def test_a_layer_on_one_gpu() -> None:
    result = counted("")
    linear = [(HIDDEN, QKV), (HEADS * SIZE, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)]
    products, matrices = (sum(2 * (TOKENS * (a + b) + a * b) for a, b in linear), sum(a * b for a, b in linear))
    assert result["GEMM"] == {"forward": products, "backward": 2 * products + (4 + 4 - 2) * matrices}  # fp32 sums
    numbers, angles = TOKENS * (HEADS + KV) * SIZE, TOKENS * SIZE // 2
    assert result["RoPE"] == dict.fromkeys(("forward", "backward"), 2 * 2 * numbers + 2 * 4 * angles)
    norm = 2 * 2 * 2 * (TOKENS * HIDDEN) + 2 * 2 * HIDDEN
    assert result["norm"]["forward"] == norm
    assert result["activation"]["forward"] == 2 * TOKENS * 3 * FFN
    weights = matrices + 2 * HIDDEN
    assert result["weight gradients: fp32 sums"] == {"backward": (2 + 4 + 4) * 2 * HIDDEN}
    # core divides gradients by the tokens; 0.16 and 0.17 only if there are any, which a simulation does not know
    assert result.pop(REST, {"backward": (4 + 4) * weights}) == {"backward": (4 + 4) * weights}
    assert not [group for group in result if group.startswith(("all-to-all", "ring", "FPDT"))]


def test_rope_by_pytorch_reads_and_writes_eight_times_as_much() -> None:
    fused, plain = (counted("", fused_rope=fused)["RoPE"]["forward"] for fused in (True, False))
    assert plain > 7 * fused
    numbers = TOKENS * (HEADS + KV) * SIZE
    assert plain == pytest.approx(UNFUSED_ROTARY_BYTES * numbers, rel=0.13)  # the rest is sine and cosine


def test_the_tool_prints_the_bytes_of_ulysses_and_a_ring(tmp_path, capsys) -> None:
    file = tmp_path / "bytes.json"
    words = f"{WORDS} --ulysses-parallel-size 2 --ring-parallel-size 2".split()
    assert traffic.main(["--gpus", "4", "--json", str(file), "--", *words]) == 0
    result, text = json.loads(file.read_text()), capsys.readouterr().out
    assert {"all-to-all: packing, unpacking", "ring: buffers", "attention: merges, sums, casts"} <= set(result)
    assert all(group in text for group in result) and math.isclose(
        result["RoPE"]["forward"], result["RoPE"]["backward"]
    )


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--gpus", "2", "--", *WORDS.split(), "--pipeline-model-parallel-size", "2"],
            "--pipeline-model-parallel-size",
        ),
        (["--rank", "1", "--", *WORDS.split()], "--rank 1"),
    ],
)
def test_refusals(words, message, capsys) -> None:
    assert traffic.main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


# torch.profiler's traces of GPUs: one made by hand, two real ones, and merged ones.


DATA = Path(__file__).with_name("data") / "traces"
Json = dict[str, Any]
STEP = ("all_to_all", "aten::mm", "all_gather", "aten::mm", "p2p", "all_reduce")
CALLS = {
    "all_to_all": ("c10d::alltoall_base_", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
    "all_gather": ("c10d::_allgather_base_", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    "all_reduce": ("c10d::allreduce_", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
    "p2p": ("c10d::send", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"),
}


def gpu_trace(late: float = 5000.0, launches: bool = True, coalesced: bool = False) -> Json:
    """Two steps as torch.profiler writes them: GEMM kernels begin ``late`` microseconds after their calls,
    NCCL kernels begin immediately, on a separate stream."""
    events: list[Json] = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 20, "ts": 0, "args": {"name": "stream 20"}},
    ]
    now, number = 1e9, 0

    def add_event(
        name: str, category: str, dur: float, pid: int = 7, tid: int = 1, at: float | None = None, **args: Any
    ):
        when = now if at is None else at
        events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": when, "dur": dur})
        events[-1]["args"] = {"External id": number, **args}

    for _ in range(2):
        for phase in ("forward", "backward", "optimizer"):
            now += 100
            add_event(phase, "user_annotation", 1.0)
            add_event(phase, "gpu_user_annotation", 1.0, 0, 7, now + late)
            for name in STEP if phase != "optimizer" else ("all_reduce",):
                now, number = now + 100, number + 1
                call, kernel = CALLS.get(name, (name, "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"))
                add_event(call, "cpu_op", 40.0)
                if name in CALLS:
                    number += 1
                    add_event("record_param_comms", "cpu_op", 30.0, at=now + 2, **{"Collective name": name})
                launch, begin = now + 10, now + (11 if name in CALLS else late)
                if coalesced and name == "p2p":
                    add_event("c10d::recv_", "cpu_op", 20.0, at=now + 42)
                    launch = now + 70
                if launches:
                    add_event("cudaLaunchKernelExC", "cuda_runtime", 5.0, at=launch, correlation=900 + number)
                    events.append({"ph": "s", "id": 900 + number, "pid": 7, "tid": 1, "ts": launch, "cat": "ac2g"})
                    end = {"ph": "f", "id": 900 + number, "pid": 0, "tid": 20, "ts": begin, "cat": "ac2g", "bp": "e"}
                    events += [{**event, "name": "ac2g"} for event in (events.pop(), end)]
                add_event(
                    kernel, "kernel", 60.0, 0, 20 if name in CALLS else 7, begin, correlation=900 + number, stream=7
                )
    return {"schemaVersion": 1, "traceEvents": events}


def dry_trace() -> Json:
    """A dry run's trace of the same step."""
    events, now = [], 500.0
    for phase in ("start", "forward", "backward", "optimizer"):
        names = {"start": (), "optimizer": ("all_reduce",)}.get(phase, STEP)
        spans = [
            {"ph": "X", "pid": 0, "tid": 1, "name": name, "ts": now + 10 * at, "dur": 9.0,
             "cat": "gemm" if name == "aten::mm" else "dp"}
            for at, name in enumerate(names)
        ]  # fmt: skip
        begin = 0.0 if phase == "start" else now
        events += [{"ph": "X", "pid": 0, "tid": 0, "name": phase, "cat": "phase", "ts": begin, "dur": 90.0}, *spans]
        now += 0 if phase == "start" else 100.0
    events.append({"ph": "s", "id": 950, "pid": 0, "tid": 0, "ts": 500.0, "name": "message", "cat": "pp"})
    events.append({"ph": "f", "id": 950, "pid": 0, "tid": 0, "ts": 600.0, "name": "message", "cat": "pp"})
    return {"traceEvents": events, "otherData": {"simulated": True}}


@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("launches", [True, False])
def test_kernels_have_the_names_and_the_order_of_their_calls(launches: bool, coalesced: bool) -> None:
    if coalesced and not launches:
        pytest.skip("without launches, nothing links a kernel to its call")
    trace = gpu_trace(launches=launches, coalesced=coalesced)
    ours, theirs = predicted(dry_trace(), 0), measured(trace, {"aten::mm": "gemm"})
    assert compare(ours, theirs).share == 1.0 and len(ours) == len(theirs)
    assert [x.name for x in theirs] == [*STEP, *STEP, "all_reduce"]
    assert [x.phase for x in theirs] == ["forward"] * 6 + ["backward"] * 6 + ["optimizer"]
    assert all(x.took == 60.0 for x in theirs)  # the kernel's time; its call takes 40
    kernels = {event["ts"] for event in trace["traceEvents"] if event.get("cat") == "kernel"}
    assert {x.begin for x in theirs} <= kernels


def test_an_incomplete_last_step_is_ignored() -> None:
    trace = gpu_trace()
    whole = measured(trace, {"aten::mm": "gemm"})
    for name, category, at in (("forward", "user_annotation", 100), ("aten::mm", "cpu_op", 200)):
        last = max(event["ts"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op")
        event = {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": 1, "ts": last + at, "dur": 40.0}
        trace["traceEvents"].append(event)
    assert measured(trace, {"aten::mm": "gemm"}) == whole


def test_a_real_trace_whose_all_to_alls_run_as_sends() -> None:
    trace = read(DATA / "all_to_all.json")
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    assert sum(name.startswith("ncclKernel_SendRecv") for name in names) == 3
    result = measured(trace, {"aten::mm": "gemm"})
    assert [x.name for x in result] == ["all_to_all"] * 2 + ["aten::mm"] * 3 + ["all_reduce"] + ["aten::mm"] * 4
    assert [x.took for x in result][:6] == [30669.0, 62783.0, 11.0, 1385.0, 1246.0, 11727.0]
    # Ordered by kernels, the reduction would come after products that were called later.
    assert result[5].begin > result[6].begin


def test_a_real_trace_with_names_of_collectives() -> None:
    trace = read(DATA / "collective_names.json")
    result = measured(trace, {"aten::mm": "gemm", "aten::addmm": "gemm"})
    assert [x.name for x in result] == ["broadcast", "aten::addmm", "aten::mm", "aten::mm", "all_reduce", "all_reduce"]
    assert [x.took for x in result][-2:] == [2636.669, 2129.38]
    comms = [event for event in trace["traceEvents"] if event["name"] == "record_param_comms"]
    assert [collective(event) for event in comms].count("all_reduce") == 2
    for event in trace["traceEvents"]:  # without launches, kernels are linked by the call's id
        if event["name"] == "record_param_comms" or event.get("cat") != "cpu_op":
            continue
        event["name"] = event["name"].replace("c10d::allreduce_", "another")
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "cuda_runtime"]
    assert [(x.name, x.took) for x in measured(trace, {"another": ""})][-2:] == [
        ("another", 2636.669),
        ("another", 2129.38),
    ]


def test_merged_traces_begin_together(tmp_path: Path, capsys) -> None:
    real, dry = gpu_trace(), dry_trace()
    events = merged(dry, [(0, real)])["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] >= 1000]
    marks = [event for event in spans if event["cat"] == "user_annotation"]
    assert [event["name"] for event in marks] == ["forward", "backward", "optimizer"]  # only of the compared step
    assert marks[0]["ts"] == 500.0 and min(event["ts"] for event in spans) >= 500.0
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0, measured", "rank 0, measured: GPU 0"}
    streams = [event for event in events if event["name"] == "thread_name"]
    kernels = [event for event in spans if event["cat"] == "kernel"]
    assert {event["pid"] for event in streams} == {event["pid"] for event in kernels}
    assert {event["pid"] for event in kernels} != {event["pid"] for event in marks}
    ends = {end: [event["id"] for event in events if event["ph"] == end] for end in ("s", "f")}
    assert sorted(ends["s"]) == sorted(ends["f"]) == sorted({*ends["s"]}) and len(ends["s"]) == 14
    (tmp_path / "dry.json").write_text(json.dumps(dry))
    (tmp_path / "real.json").write_text(json.dumps(real))
    words = [str(tmp_path / name) for name in ("dry.json", "real.json")]
    assert compare_trace.main([*words, "--merged", str(tmp_path / "both.json")]) == 0
    assert "100.0%" in capsys.readouterr().out
