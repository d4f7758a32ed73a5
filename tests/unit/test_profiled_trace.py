# SPDX-License-Identifier: Apache-2.0
"""torch.profiler's traces of GPUs, read by calls and kernels: one made by hand, two real ones; and merged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import compare_trace
from tools.merged_trace import merged
from tools.profiled_trace import collective, measured
from tools.trace_alignment import compare, predicted, read

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
    """Two steps as torch.profiler writes them: products' kernels begin ``late`` microseconds after their calls,
    those of NCCL at once, on a stream of their own."""
    events: list[Json] = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "pid": 0, "tid": 0, "ts": 0, "args": {"labels": "GPU 0"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 20, "ts": 0, "args": {"name": "stream 20"}},
    ]
    now, number = 1e9, 0

    def say(name: str, category: str, dur: float, pid: int = 7, tid: int = 1, at: float | None = None, **args: Any):
        when = now if at is None else at
        events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": when, "dur": dur})
        events[-1]["args"] = {"External id": number, **args}

    for _ in range(2):
        for phase in ("forward", "backward", "optimizer"):
            now += 100
            say(phase, "user_annotation", 1.0)
            say(phase, "gpu_user_annotation", 1.0, 0, 7, now + late)
            for name in STEP if phase != "optimizer" else ("all_reduce",):
                now, number = now + 100, number + 1
                call, kernel = CALLS.get(name, (name, "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn"))
                say(call, "cpu_op", 40.0)
                if name in CALLS:
                    number += 1
                    say("record_param_comms", "cpu_op", 30.0, at=now + 2, **{"Collective name": name})
                launch, begin = now + 10, now + (11 if name in CALLS else late)
                if coalesced and name == "p2p":
                    say("c10d::recv_", "cpu_op", 20.0, at=now + 42)
                    launch = now + 70
                if launches:
                    say("cudaLaunchKernelExC", "cuda_runtime", 5.0, at=launch, correlation=900 + number)
                    events.append({"ph": "s", "id": 900 + number, "pid": 7, "tid": 1, "ts": launch, "cat": "ac2g"})
                    end = {"ph": "f", "id": 900 + number, "pid": 0, "tid": 20, "ts": begin, "cat": "ac2g", "bp": "e"}
                    events += [{**event, "name": "ac2g"} for event in (events.pop(), end)]
                say(kernel, "kernel", 60.0, 0, 20 if name in CALLS else 7, begin, correlation=900 + number, stream=7)
    return {"schemaVersion": 1, "traceEvents": events}


def dry_trace() -> Json:
    """The same step as a dry run predicts it."""
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
def test_calls_say_what_kernels_are_and_in_which_order(launches: bool, coalesced: bool) -> None:
    if coalesced and not launches:
        pytest.skip("nothing tells then which call a kernel is of")
    trace = gpu_trace(launches=launches, coalesced=coalesced)
    ours, theirs = predicted(dry_trace(), 0), measured(trace, {"aten::mm": "gemm"})
    assert compare(ours, theirs).share == 1.0 and len(ours) == len(theirs)
    assert [x.name for x in theirs] == [*STEP, *STEP, "all_reduce"]
    assert [x.phase for x in theirs] == ["forward"] * 6 + ["backward"] * 6 + ["optimizer"]
    assert all(x.took == 60.0 for x in theirs)  # of the kernel; its call takes 40
    kernels = {event["ts"] for event in trace["traceEvents"] if event.get("cat") == "kernel"}
    assert {x.begin for x in theirs} <= kernels


def test_a_step_that_the_profiler_stopped_in_does_not_count() -> None:
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
    found = measured(trace, {"aten::mm": "gemm"})
    assert [x.name for x in found] == ["all_to_all"] * 2 + ["aten::mm"] * 3 + ["all_reduce"] + ["aten::mm"] * 4
    assert [x.took for x in found][:6] == [30669.0, 62783.0, 11.0, 1385.0, 1246.0, 11727.0]
    # In the order of kernels the reduction would be behind products that were called after it.
    assert found[5].begin > found[6].begin


def test_a_real_trace_that_says_collectives_names() -> None:
    trace = read(DATA / "collective_names.json")
    found = measured(trace, {"aten::mm": "gemm", "aten::addmm": "gemm"})
    assert [x.name for x in found] == ["broadcast", "aten::addmm", "aten::mm", "aten::mm", "all_reduce", "all_reduce"]
    assert [x.took for x in found][-2:] == [2636.669, 2129.38]
    comms = [event for event in trace["traceEvents"] if event["name"] == "record_param_comms"]
    assert [collective(event) for event in comms].count("all_reduce") == 2
    for event in trace["traceEvents"]:  # its kernels are found by the call's id as well
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
    assert [event["name"] for event in marks] == ["forward", "backward", "optimizer"]  # of the compared step alone
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
