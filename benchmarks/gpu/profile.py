# SPDX-License-Identifier: Apache-2.0
"""A step's time by kind of kernel, by torch.profiler, with the device's idle time and the share of overlapped copies.

On a CPU the operations of the main thread are counted instead of kernels.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

Spans = list[tuple[float, float]]
TOP = 12

# The first pattern that a kernel's name matches, in any case; flash kernels come before CUTLASS, on which they build.
GROUPS = {
    "copies to the host": r"memcpy dtoh",
    "copies to the device": r"memcpy htod",
    "copies within": r"memcpy|memset|aten::copy_|aten::_to_copy|aten::zero_|aten::fill_|aten::cat|CatArray|direct_copy",
    "communication": r"nccl|c10d::|gloo",
    "RoPE": r"rotate|rotary|rope",
    "attention": r"^(forward|query|key|delta)_kernel|flash|fmha|sdpa|attention|cudnn_generated_fort_native",
    "GEMM": r"gemm|nvjet|cutlass|xmma|cublas|_mma_|aten::(mm|bmm|addmm|baddbmm|linear|matmul)\b|splitk",
    "norm": r"rms_?norm|layer_?norm|rsqrt",
    "optimizer": r"adam|multi_tensor",
}
OTHER = "elementwise"


@dataclass(frozen=True)
class KernelRun:
    """A kernel or copy, with times in microseconds."""

    name: str
    begin: float
    end: float


def group_of(name: str) -> str:
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER)


def where_time_goes(run: Callable[[], object], device: torch.device) -> dict:
    """Seconds of one run by group, ``idle`` time, the ``TOP`` kernels, and the share of host copies overlapped."""
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities) as result:
        begin = time.perf_counter()
        run()
        if cuda:
            torch.cuda.synchronize(device)
        wall = time.perf_counter() - begin
    if cuda:
        wanted = torch.autograd.DeviceType.CUDA
        events = result.events()
        return summary(
            [
                KernelRun(e.name, e.time_range.start, e.time_range.end)
                for e in events
                if e.device_type == wanted and not e.is_user_annotation  # such as Optimizer.step, over its kernels
            ]
        )
    rows = [(row.key, row.self_cpu_time_total / 1e6, row.count) for row in result.key_averages()]
    rows = [row for row in rows if row[0].startswith(("aten::", "c10d::"))]
    return report(rows, max(0.0, wall - sum(seconds for _, seconds, _ in rows)), wall)


def summary(ran: list[KernelRun]) -> dict:
    """:func:`where_time_goes` from a device's kernels; streams overlap, so groups may add up to more than the step."""
    if not ran:
        return {"seconds": 0.0, "groups": {}, "top": []}
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for each in ran:
        totals[each.name][0] += (each.end - each.begin) / 1e6
        totals[each.name][1] += 1
    span = (max(each.end for each in ran) - min(each.begin for each in ran)) / 1e6
    busy = length(union((each.begin, each.end) for each in ran)) / 1e6
    rows = [(name, seconds, count) for name, (seconds, count) in totals.items()]
    return report(rows, span - busy, span) | {"hidden_copies": hidden(ran)}


def report(rows: list[tuple[str, float, int]], idle: float, wall: float) -> dict:
    groups: dict[str, float] = defaultdict(float)
    for name, seconds, _ in rows:
        groups[group_of(name)] += seconds
    top = sorted(rows, key=lambda row: -row[1])[:TOP]
    return {
        "seconds": wall,
        "groups": dict(sorted(groups.items(), key=lambda item: -item[1])) | {"idle": idle},
        "top": [{"name": name[:160], "group": group_of(name), "seconds": s, "count": n} for name, s, n in top],
    }


def hidden(ran: list[KernelRun]) -> float | None:
    """The share of the time of copies from and to the host during which a kernel runs; None without such copies."""
    is_host_copy = {group: group.startswith("copies to") for group in (*GROUPS, OTHER)}
    copies = union((each.begin, each.end) for each in ran if is_host_copy[group_of(each.name)])
    kernels = union((each.begin, each.end) for each in ran if not is_host_copy[group_of(each.name)])
    total = length(copies)
    if not total:
        return None
    return (total + length(kernels) - length(union([*copies, *kernels]))) / total


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """Spans that do not overlap, in order."""
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
