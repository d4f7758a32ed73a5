# SPDX-License-Identifier: Apache-2.0
"""The measurements of tools/measure_hardware.py, and their conversion to the fields of a machine file."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from megatron.context_parallel.attention.kernels.triton_kernels.triton_call import Launch
from megatron.decisions.block_sizes import Blocks, Pass
from megatron.platform.cpu import processor_name
from megatron.simulator.machines import measure_device
from megatron.simulator.machines.machine import KINDS
from megatron.simulator.machines.machine_file import load
from megatron.simulator.machines.measure_blocks import CANDIDATES, HEADS, best_blocks
from megatron.simulator.machines.measure_device import DTYPES, HEAD_DIM, HEAD_SIZES, Effort, context_and_workspace
from megatron.simulator.machines.measure_links import Figures, figures, measure_in_processes
from megatron.training.refusal import Refusal
from megatron.training.report.mfu import GPU_PEAKS

Advance = Callable[[str], None]  # advances the progress bar, and shows a text on it


def chosen_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda: no GPU is visible to this torch; use --device cpu or auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def chosen_effort(args: argparse.Namespace, device: str) -> Effort:
    plan = measure_device.effort(device, args.quick)
    if args.gemm_sizes:
        plan = replace(plan, gemm=tuple(args.gemm_sizes))
    if args.attention_lengths:
        plan = replace(plan, attention=tuple(args.attention_lengths))
    if args.message_mib:
        plan = replace(plan, message_bytes=max(1, int(args.message_mib * 2**20)))
    return plan


def follow(device: torch.device, plan: Effort) -> int:
    """Take part in the collectives (on every rank of torchrun except rank 0); returns the exit code."""
    figures(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), plan, lambda text: None)
    return 0


def measured(device: torch.device, plan: Effort, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of the machine file, measured with a progress bar on standard error."""
    cuda = device.type == "cuda"
    processes = args.processes or (torch.cuda.device_count() if cuda else min(2, os.cpu_count() or 1))
    if "RANK" in os.environ:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cuda and processes > torch.cuda.device_count():
        raise Refusal(f"--processes {processes}: there are only {torch.cuda.device_count()} GPUs: give at most as many")
    if not cuda:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // processes)))
    columns = (TextColumn("{task.description:44}"), BarColumn(), TimeElapsedColumn())
    steps = len(plan.gemm) + len(plan.attention) + len(HEAD_SIZES) + 5 + (len(KINDS) if processes > 1 else 0)
    steps += len(CANDIDATES) * len(HEADS) * args.attention
    if int(os.environ.get("WORLD_SIZE", processes)) > processes:
        steps += len(KINDS) + (processes > 1)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("start", total=steps)

        def advance(text: str) -> None:
            progress.update(task, description=text, advance=1)

        runtime = context_and_workspace(device) if cuda else {}  # before anything else has used the GPU
        links = link_figures(device, processes, plan, args.timeout, advance)
        raw = device_figures(device, plan, advance)
        if cuda:
            raw["capability"] = list(torch.cuda.get_device_capability(device))
        if args.attention:
            timer = partial(seconds_of_launches, device=device, window=plan.window / 5)
            raw |= block_fields(CANDIDATES, timer, device, advance)
        progress.update(task, completed=steps, description="done")
    raw |= node_fields(links, raw, device) | runtime_fields(runtime, links)
    return named(raw, args.output, device)


def block_fields(
    candidates: dict[Pass, list[Blocks]],
    timer: Callable[[list[Launch]], float],
    device: torch.device,
    advance: Advance,
    **sizes: Any,
) -> dict[str, Any]:
    """The field ``attention_blocks``: the fastest block sizes of the Triton kernels; ``sizes``: see `best_blocks`."""
    best = best_blocks(candidates, timer, device, advance=advance, **sizes)
    return {
        "attention_blocks": {
            which: {str(head): asdict(blocks) for head, blocks in by_head.items()} for which, by_head in best.items()
        }
    }


def seconds_of_launches(launches: list[Launch], device: torch.device, window: float) -> float:
    return measure_device.seconds_of(lambda: [launch.run() for launch in launches], device, window)


def link_figures(device: torch.device, processes: int, plan: Effort, timeout: float, advance: Advance) -> Figures:
    if dist.is_initialized():
        return figures(device, processes, plan, advance)
    if processes == 1:
        advance("copies to the host")
        return Figures({}, {}, measure_device.host_copy(plan.copy_bytes, device, plan.window), 1, 1)
    return measure_in_processes(processes, device.type, plan, timeout, advance)


def device_figures(device: torch.device, plan: Effort, advance: Advance) -> dict[str, Any]:
    """FLOP/s, memory bandwidth (bytes/s) and launch time (s) of one device."""
    window = plan.window
    main, other = ("bf16", "fp32") if device.type == "cuda" else ("fp32", "bf16")
    gemm = []
    for size in plan.gemm:
        advance(f"products of {size} in {main}")
        gemm.append([size, measure_device.gemm_rate(size, DTYPES[main], device, window)])
    advance(f"products in {other}")
    other_rate = measure_device.gemm_rate(plan.gemm[-1], DTYPES[other], device, window)
    forward, backward = [], []
    for length in plan.attention:
        advance(f"attention of {length} tokens")
        rates = measure_device.attention_rates(length, plan.heads, HEAD_DIM, DTYPES[main], device, window)
        forward.append([length, rates[0]])
        backward.append([length, rates[1]])
    middle, sizes = plan.attention[len(plan.attention) // 2], []
    for head_dim in HEAD_SIZES:
        advance(f"attention with heads of {head_dim}")
        rates = measure_device.attention_rates(middle, plan.heads, head_dim, DTYPES[main], device, window)
        sizes.append([head_dim, 1 / (1 / rates[0] + 2.5 / rates[1])])  # both passes
    base = dict(sizes)[HEAD_DIM]
    advance("memory")
    memory = measure_device.memory_bandwidth(plan.copy_bytes, device, window)
    advance("launch")
    launch = measure_device.launch_seconds(device, window)
    best = max(rate for _, rate in gemm + forward + backward)
    sheet = [peak for word, peak in GPU_PEAKS.items() if word.lower() in device_name(device).lower()]
    sheet_peak = 1e12 * sheet[0] if sheet and device.type == "cuda" else 0.0
    return {
        "peak": {main: max(best, sheet_peak), other: other_rate},
        "memory_bandwidth": memory,
        "gemm": gemm,
        "attention": forward,
        "attention_backward": backward,
        "head_size": [[size, rate / base] for size, rate in sizes],
        "launch": launch,
        "dtype": main,
        "attention_kernel": "auto" if device.type == "cuda" else "cpu",
        "sources": {"peak": f"{main}: data sheet; {other}: measured" if sheet_peak else "the best that was measured"},
    }


def node_fields(links: Figures, raw: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Memory, node, links and network."""
    cuda = device.type == "cuda"
    ram = psutil.virtual_memory()
    free, total = torch.cuda.mem_get_info(device) if cuda else (ram.available, ram.total)
    share = 1 if cuda else links.processes
    sources = dict(raw["sources"])
    link, collective = node_link(links, raw)
    if not links.node:
        sources["link"] = "not measured with one process: half the memory's bandwidth is used instead"
    network = network_link(links)
    if network is None:
        network = {name: link[name] for name in ("bandwidth", "latency")}
        sources["network"] = "not measured on one node: the node's link is used instead"
    if not cuda:
        sources["host_memory"] = "measured; the devices' memory is part of it"
    return {
        "memory": total // share,
        "reserved": (total - free) // share,
        "gpus": links.processes,
        "link": link,
        "host_link": {"bandwidth": links.host[0], "latency": links.host[1]},
        "host_memory": ram.total,
        "network": network,
        "collective": collective,
        "sources": sources,
    }


def runtime_fields(runtime: dict[str, int], links: Figures) -> dict[str, Any]:
    """The field ``runtime``: bytes of memory outside of tensors; empty without a GPU."""
    sizes = runtime | links.buffers
    return {"runtime": sizes} if sizes else {}


def node_link(links: Figures, raw: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """(link between a node's processes, with figures for each kind of transfer; fixed seconds of every transfer).

    A small message takes the fixed time plus one latency; a small all_gather on n ranks the fixed time plus n - 1.
    """
    if not links.node:
        return {"bandwidth": raw["memory_bandwidth"] / 2, "latency": raw["launch"]}, 0.0
    best = max(bandwidth for _, bandwidth in links.node.values())
    hop, gather, ranks = links.node["p2p"][0], links.node["all_gather"][0], links.processes
    latency = min(hop, max(0.0, (gather - hop) / (ranks - 2))) if ranks > 2 else 0.0
    return {"bandwidth": best, "latency": latency, "kinds": of_kinds(links.node, ranks)}, hop - latency


def network_link(links: Figures) -> dict[str, Any] | None:
    """The link between nodes, and how many processes share a network card; None with one node.

    The number follows from the bandwidth of a process that sends alone, divided by its bandwidth when all processes
    send: it is 1 if each has its own card.
    """
    if not links.network:
        return None
    latency, bandwidth = links.network["p2p"]
    link = {"bandwidth": bandwidth, "latency": latency, "kinds": of_kinds(links.network, links.nodes)}
    ratio = max(1.0, links.alone / bandwidth)
    divisors = (n for n in range(1, links.processes + 1) if links.processes % n == 0)
    sharing = min(divisors, key=lambda n: abs(math.log(n / ratio)))
    return link | ({"gpus_per_card": sharing} if sharing > 1 else {})


def of_kinds(measured: dict[str, tuple[float, float]], ranks: int) -> dict[str, dict[str, float]]:
    """Bandwidth, and latency per step, by kind of transfer among ``ranks``."""
    steps = {kind: 1 if kind == "p2p" else ranks - 1 for kind in measured}
    return {kind: {"bandwidth": rate, "latency": start / steps[kind]} for kind, (start, rate) in measured.items()}


def named(raw: dict[str, Any], output: str, device: torch.device) -> dict[str, Any]:
    """Add a name, and a source for each field."""
    source = f"measured on {device_name(device)}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    sources = dict.fromkeys((name for name in raw if name != "sources"), source) | raw["sources"]
    return {"name": Path(output).stem} | rounded(raw) | {"sources": sources}


def rounded(figure: Any) -> Any:
    """Round all floats to four digits."""
    if isinstance(figure, dict):
        return {key: rounded(value) for key, value in figure.items()}
    if isinstance(figure, list):
        return [rounded(value) for value in figure]
    return float(f"{figure:.4g}") if isinstance(figure, float) else figure


def print_result(output: str, busy: float) -> None:
    machine = load(output)
    rates = (machine.gemm, machine.attention, machine.attention_backward)
    speeds = [f"{max(rate for _, rate in r.points) / 1e9:,.0f}" for r in rates]
    print(f"GFLOP/s of one device: products {speeds[0]}, attention forward {speeds[1]}, backward {speeds[2]}")
    print(
        f"GB/s: memory {machine.memory_bandwidth / 1e9:.1f}, host {machine.host_link.bandwidth / 1e9:.1f}, "
        f"between processes {machine.link.bandwidth / 1e9:.1f}"
    )
    if busy > 0.5:
        busy_cores = f"{busy:.0%} of this machine's cores were busy before the start"
        print(f"note: {busy_cores}: an idle machine has higher figures")
    print(f"written: {output}; use it as --gpu {output}")
