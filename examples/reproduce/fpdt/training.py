# SPDX-License-Identifier: Apache-2.0
"""FPDT's MFU (figures 1, 11 and 12, table 3), simulated or measured, and the latencies of a layer (figure 10).

Settings of the paper: batch 1, full recompute with layer inputs in host memory, ZeRO 3 over all ranks; Megatron-SP has
TP over all ranks. Chunks of 64K tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from examples.reproduce.report import Row, published
from examples.reproduce.simulate import Clock, shape_of
from megatron.formulas.strategy import Group, Shape, Strategy, Workload
from megatron.simulator.cost.estimate import model_flops
from megatron.simulator.cost.operations import BF16, collective, tile
from megatron.simulator.cost.seconds import copy_seconds, kernel_seconds, transfer_seconds
from megatron.simulator.cost.trace import HostCopy, Transfer
from megatron.simulator.machines.machine import Machine

CHUNK = 65536
MODELS = ("gpt-2.7b", "gpt-6.7b", "llama3-8b", "gpt-13b", "gpt-30b", "llama3-70b")
CONVENTIONS = ("causal", "causal with recompute", "full mask with recompute")


def shape(model: str) -> Shape:
    """The shape of a model. 30B has OPT's width and depth with 64 heads of 112: 56 do not divide over 16 ranks."""
    return shape_of(model, **({"num_attention_heads": 64} if model == "gpt-30b" else {}))


def strategy(system: str, gpus: int, chunk: int = CHUNK) -> Strategy:
    """The strategy of a system; the clock's argument says whether layer inputs are in host memory."""
    if system == "megatron-sp":
        return Strategy(tensor=gpus, recompute="full")
    return Strategy(ulysses=gpus, zero=3, recompute="full", fpdt_chunk=chunk if system == "fpdt" else 0)


def mfu(workload: Workload, seconds: float, gpus: int, peak: float) -> dict[str, float]:
    """MFU in percent by each convention of counting FLOPs; recompute is a second forward pass."""
    causal, full = (model_flops(replace(workload, causal=flag), recompute=False)[0] for flag in (True, False))
    capacity = seconds * gpus * peak / 100
    return dict(zip(CONVENTIONS, (causal / capacity, causal * 4 / 3 / capacity, full * 4 / 3 / capacity)))


def counted(workload: Workload, seconds: float | str, gpus: int, clock: Clock) -> dict[str, float | str]:
    """:func:`mfu`, rounded; if ``seconds`` is a word such as OOM, every convention has this word."""
    if isinstance(seconds, str):
        return dict.fromkeys(CONVENTIONS, seconds)
    return {name: round(share, 1) for name, share in mfu(workload, seconds, gpus, clock.peak).items()}


def figure_11_rows(clock: Clock, convention: str = CONVENTIONS[1], models: Sequence[str] = MODELS) -> list[Row]:
    return [_mfu_row(clock, line, convention) for line in _figure_11(models)]


def _figure_11(models: Sequence[str]) -> list[dict]:
    return [line for line in published("fpdt_figure_11_mfu") if line["model"] in models]


def _mfu_row(clock: Clock, line: dict, convention: str = CONVENTIONS[1]) -> Row:
    workload = Workload(shape(line["model"]), line["seq_length"])
    took = clock.seconds(line["model"], workload, strategy(line["system"], line["gpus"]), inputs_in_host=True)
    shares = counted(workload, took, line["gpus"], clock)
    label = {key: line[key] for key in ("model", "gpus", "system", "seq_length")}
    notes = ["64 heads of 112 assumed"] * (line["model"] == "gpt-30b")
    if not isinstance(took, str):
        notes.append(", ".join(f"{shares[name]:.1f} {name}" for name in CONVENTIONS if name != convention))
    return Row(label, line["mfu_percent_read_off_chart"], shares[convention], clock.mark, "% MFU", "; ".join(notes))


def figure_1_rows(clock: Clock) -> list[Row]:
    """The longest context of each system in figure 11."""
    return [_mfu_row(clock, line) for line in longest_shown(("gpt-2.7b", "gpt-13b", "llama3-70b"))]


def longest_shown(models: Sequence[str]) -> list[dict]:
    """The line of figure 11 with the longest sequence, for each model and system."""
    longest: dict[tuple, dict] = {}
    for line in _figure_11(models):
        key = line["model"], line["system"]
        if key not in longest or line["seq_length"] > longest[key]["seq_length"]:
            longest[key] = line
    return list(longest.values())


def figure_12_rows(clock: Clock, length: int = 262144) -> list[Row]:
    """MFU by chunk size; one chunk with all tokens is Ulysses without FPDT. 30B on 8 GPUs, others on 4."""
    rows = []
    for model in ("gpt-2.7b", "gpt-6.7b", "gpt-13b", "gpt-30b"):
        gpus = 8 if model == "gpt-30b" else 4
        for chunk in (8192 << n for n in range(6)):
            workload = Workload(shape(model), length)
            chosen = strategy("fpdt" if chunk < length else "ulysses", gpus, chunk)
            took = clock.seconds(model, workload, chosen, inputs_in_host=True)
            ours = counted(workload, took, gpus, clock)[CONVENTIONS[1]]
            rows.append(Row({"model": model, "chunk": chunk}, None, ours, clock.mark, "% MFU"))
    return rows


def table_3_rows(clock: Clock) -> list[Row]:
    """MFU of Llama-3-8B on 8 GPUs by strategy, each at its longest context; recompute counts as work.

    No constant was fitted to these rows.
    """
    rows = []
    for line in published("fpdt_table_3_strategies"):
        tensor, again = line["tensor_parallel"], line["checkpoint"] == "yes"
        chunk, recompute = CHUNK if line["fpdt"] == "yes" else 0, "full" if again else "none"
        ulysses = line["gpus"] // tensor
        chosen = Strategy(tensor=tensor, ulysses=ulysses, zero=line["zero"], recompute=recompute, fpdt_chunk=chunk)
        workload = Workload(shape(line["model"]), line["max_context_tokens"])
        offloads = line["checkpoint_offload"] == "yes"
        took = clock.seconds(line["model"], workload, chosen, inputs_in_host=offloads)
        named = [f"TP {tensor}" if tensor > 1 else f"Ulysses {chosen.ulysses}, ZeRO {chosen.zero}"]
        named += ["recompute"] * again + ["inputs in host memory"] * offloads
        named += ["FPDT"] * (line["fpdt"] == "yes")
        label = {"strategy": ", ".join(named), "seq_length": workload.seq_length}
        ours = counted(workload, took, line["gpus"], clock)[CONVENTIONS[1 if again else 0]]
        rows.append(Row(label, line["mfu_percent"], ours, clock.mark, "% MFU"))
    return rows


GPUS, HEADS, HEAD_DIM = 4, 32, 128  # of figure 10, which is about one layer
LENGTHS = tuple(4096 << n for n in range(8))


def figure_10_rows(machine: Machine) -> list[Row]:
    """Milliseconds of an all-to-all of one tensor, attention over the sequence, and fetching keys and values."""
    crossing = first_covered(machine)
    note = f"attention takes longer than fetching from {crossing // 1024}K tokens on; the text says 32K to 64K"
    rows = []
    for length in LENGTHS:
        for n, (part, took) in enumerate(latencies(machine, length).items()):
            label, said = {"part": part, "seq_length": length}, note * (n == 3 and length == LENGTHS[0])
            rows.append(Row(label, None, round(1e3 * took, 3), "simulated", "ms", said))
    return rows


def latencies(machine: Machine, length: int) -> dict[str, float]:
    """Seconds of each part of the layer with sequences of ``length``."""
    heads, group = HEADS // GPUS, Group(GPUS)
    tensor = BF16 * length * heads * HEAD_DIM  # of q, k, v or out on one GPU, before or after the all-to-all
    forward, backward = (
        kernel_seconds(tile(length, length, heads, HEAD_DIM, length**2 / 2, backward=way), machine)
        for way in (False, True)
    )
    scatter = Transfer("p2p", "ulysses", group, 2.0 * tensor * (GPUS - 1))
    return {
        "all-to-all": transfer_seconds(collective("all_to_all", "ulysses", group, tensor), machine),
        "attention forward": forward,
        "attention backward": backward,
        "fetch, each GPU its own": copy_seconds(HostCopy("to_device", 2.0 * tensor), machine),
        "fetch by one GPU, then scatter": copy_seconds(HostCopy("to_device", 2.0 * tensor * GPUS), machine)
        + transfer_seconds(scatter, machine),
    }


def first_covered(machine: Machine) -> int:
    """The shortest length, in steps of 1K, whose forward attention takes as long as fetching."""
    for length in count(1024, 1024):
        result = latencies(machine, length)
        if result["attention forward"] >= result["fetch, each GPU its own"]:
            return length
