# SPDX-License-Identifier: Apache-2.0
"""The memory that a model needs, by ZeRO stage, recompute, context parallelism and FPDT: rows, a table, a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron.formulas.device_memory import Memory, device_memory
from megatron.formulas.papers import QWEN2
from megatron.formulas.papers import activations as papers_activations
from megatron.formulas.papers import model_states as papers_states
from megatron.formulas.parameters import stage_parameters
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.machines.machine import Machine
from megatron.simulator.planner.explain import KINDS
from megatron.simulator.planner.plans import fullest
from megatron.simulator.planner.search_space import expert_sizes
from megatron.system.whole_file import save_figure
from megatron.training.families.named import shape as named_shape
from megatron.training.families.named import vocabulary
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.models import model_shape

COLORS = ("#4c72b0", "#55a868", "#8172b3", "#dd8452", "#937860")
SUFFIXES = {"K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
FPDT_CHUNK = 65536


@dataclass(frozen=True)
class Row:
    """A strategy, and the memory of the rank that needs most."""

    strategy: Strategy
    memory: Memory
    fits: bool | None  # None: no GPU was named

    @property
    def context(self) -> str:
        """How the sequence is split and offloaded, in words."""
        strategy = self.strategy
        if strategy.context == 1:
            split = "whole sequence"
        else:
            parts = (("Ulysses", strategy.ulysses), ("Ring", strategy.ring))
            split = " x ".join(f"{name} {ranks}" for name, ranks in parts if ranks > 1)
        if strategy.fpdt_chunk:
            return f"{split}, FPDT"
        return f"{split}, inputs offloaded" if strategy.offload_checkpoints else split

    def as_json(self) -> dict[str, Any]:
        return {"strategy": asdict(self.strategy), **asdict(self.memory), "total": self.memory.total, "fits": self.fits}


def size(flag: str, text: str, *, binary: bool = True) -> int:
    """``128K`` as tokens (K = 1024) or, with ``binary=False``, ``7B`` as parameters (K = 1000).

    Raises:
        Refusal: ``text`` is not a positive number, with K, M, G, B, T or nothing after it.
    """
    number, power = text.strip().upper(), 0
    if number[-1:] in SUFFIXES:
        number, power = number[:-1], SUFFIXES[number[-1]]
    try:
        value = float(number) * (1024 if binary else 1000) ** power
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e18:
        raise Refusal(f"{flag} {text}: not a size; write a positive number such as 131072, 128K, 1M or 7B")
    return round(value)


def shape_of(name: str, seq_length: int) -> Shape:
    """A named model. With learned positions, it has as many as the sequence has tokens, unless it fixes their number.

    Raises:
        Refusal: no such model; the message lists the known ones.
    """
    settings = named_shape(name)
    model = ModelConfig(**{**settings, "model": name})
    if model.position_embedding_type == "learned_absolute" and not model.max_position_embeddings:
        model = replace(model, max_position_embeddings=seq_length)
    return model_shape(model, vocabulary(name))


def shape_of_size(parameters: int) -> Shape:
    """The Llama with about ``parameters``: head size 128, as many layers as heads, FFN 8/3 x hidden, vocabulary 32,000.

    Raises:
        Refusal: there are fewer parameters than in the smallest such model.
    """
    shapes = []
    for heads in range(2, 513):
        hidden = 128 * heads
        ffn = -(-hidden * 8 // 3 // 256) * 256
        shapes.append(Shape(heads, hidden, ffn, heads, heads, 128, 32000))
    best = min(shapes, key=lambda shape: abs(stage_parameters(shape, 1, 1, 0).numel - parameters))
    if best is shapes[0] and parameters < 0.8 * stage_parameters(best, 1, 1, 0).numel:
        raise Refusal(f"--params {parameters}: smaller than a Llama of two layers; use --model")
    return best


def strategies(
    shape: Shape, *, gpus: int, tensor: int, pipeline: int, seq_length: int, expert: int = 0
) -> Iterator[Strategy]:
    """ZeRO stage x (data parallel only, context parallel, with inputs offloaded, FPDT) x recompute.

    Ulysses has at most as many ranks as a TP rank has key/value heads; Ring has the other ranks. Models with experts or
    states have no formula for FPDT.

    Args:
        expert: EP; 0: as many ranks as possible.

    Raises:
        Refusal: TP x PP does not divide the GPUs, TP the heads, PP the layers, or EP the experts and ranks.
    """
    if gpus % (tensor * pipeline):
        raise Refusal(f"--gpus {gpus} is not a multiple of --tensor {tensor} x --pipeline {pipeline}")
    for value, flag, what, number in (
        (tensor, "--tensor", "query heads", shape.heads),
        (pipeline, "--pipeline", "layers", shape.layers),
    ):
        if number % value:
            raise Refusal(f"{flag} {value} does not divide the {number} {what}: use a divisor")
    ranks = gpus // tensor // pipeline
    sizes = expert_sizes(shape, gpus // pipeline)
    if expert and expert not in sizes:
        raise Refusal(f"--expert {expert}: use one of {', '.join(map(str, sizes))}, which divide experts and ranks")
    ulysses = gcd(max(shape.kv_heads // tensor, 1), ranks)
    context = {"ulysses": ulysses, "ring": ranks // ulysses}
    full: dict[str, Any] = {"recompute": "full"}
    chunk = min(FPDT_CHUNK, seq_length)
    choices: list[dict[str, Any]] = [{"data": ranks}, {"data": ranks, **full}]
    if ranks > 1:
        choices += [context, {**context, **full}]
    offload = {**context, **full, "offload_checkpoints": True}
    choices.append(offload)
    if not (shape.mixture or shape.mixed):
        choices.append({**offload, "fpdt_chunk": chunk})
    for zero in range(2 if pipeline > 1 else 4):  # ZeRO 2 and 3 cannot be combined with pipeline stages
        for choice in choices:
            yield Strategy(tensor=tensor, pipeline=pipeline, zero=zero, expert=expert or sizes[-1], **choice)


def rows(
    shape: Shape, seq_length: int, strategies: Iterator[Strategy], *, itemsize: int = 2, machine: Machine | None = None
) -> list[Row]:
    """For each strategy, the memory of the pipeline stage that needs most."""
    result = []
    for strategy in strategies:
        # Enough sequences for all pipeline stages and data-parallel ranks.
        workload = Workload(shape, seq_length, strategy.data * strategy.pipeline * strategy.micro_batch)
        memory, fits = fullest(workload, strategy, itemsize), None
        if machine is not None:
            room = machine.usable_memory
            fits = memory.total <= room and memory.host * machine.gpus <= machine.host_memory
        result.append(Row(strategy, memory, fits))
    return result


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"


def table(rows: Sequence[Row], title: str) -> Table:
    """A table of one rank's memory in GiB."""
    result = Table(
        title=title,
        caption="GiB per GPU at the peak (with ZeRO 2 and 3 few gradients exist then); host: part of the node's memory",
    )
    for name in ("ZeRO", "recompute", "sequence"):
        result.add_column(name)
    for name in (*KINDS, "total", "host"):
        result.add_column(name, justify="right")
    if any(row.fits is not None for row in rows):
        result.add_column("fits")
    before = None
    for row in rows:
        strategy, memory = row.strategy, row.memory
        if before is not None and before != strategy.zero:
            result.add_section()
        before = strategy.zero
        cells = [str(strategy.zero), strategy.recompute, row.context]
        cells += [gib(getattr(memory, kind)) for kind in KINDS] + [gib(memory.total), gib(memory.host)]
        if row.fits is not None:
            cells.append("yes" if row.fits else "no")
        result.add_row(*cells, style="green" if row.fits else None)
    return result


def papers_tables(shape: Shape, seq_length: int) -> list[Table]:
    """The web page's formulas (formulas/papers.py) and ours; the page's figures for Qwen2 and the page's formula."""
    numel = stage_parameters(shape, 1, 1, 0).numel
    workload = Workload(shape, seq_length)
    ours = device_memory(workload, Strategy(zero=0))
    one = Table(title="one GPU, without savings: the memory page's formulas and ours", caption="GiB")
    for name in ("", "the page", "ours", "why they differ"):
        one.add_column(name, justify="left" if name in ("", "why they differ") else "right")
    states = ours.parameters + ours.gradients + ours.optimizer
    page = papers_activations(shape.layers, 1, seq_length, shape.hidden, shape.heads)
    one.add_row("model states", gib(papers_states(numel)), gib(states), "our gradients are fp32: 18 bytes, not 16")
    one.add_row(
        "activations",
        gib(page),
        gib(ours.activations),
        "flash attention keeps no scores; the page counts neither logits nor temporary tensors",
    )
    qwen = Table(title="activations of Qwen2 at 4,096 tokens (GB): linear + quadratic term")
    for name in ("model", "printed", "by the page's formula", "formula of the printed numbers"):
        qwen.add_column(name, justify="left" if name == "model" else "right")
    for row in QWEN2:
        pairs = (row.linear, row.square), row.formula, row.as_printed
        qwen.add_row(row.name, *(f"{linear:,.1f} + {square:,.1f}" for linear, square in pairs))
    qwen.caption = "last column: 33 L bsd, and 8 bs^2H of one layer; for 7B the page prints 3.9, not 13.6"
    return [one, qwen]


def draw(rows: Sequence[Row], title: str, path: Path, machine: Machine | None = None) -> None:
    """Draw a stacked bar for each row, and the GPU's memory as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.4 + 0.27 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(rows))
    left = [0.0] * len(rows)
    for kind, color in zip(KINDS, COLORS):
        sizes = [getattr(row.memory, kind) / 2**30 for row in rows]
        axes.barh(places, sizes, left=left, color=color, label=kind, height=0.75)
        left = [a + b for a, b in zip(left, sizes)]
    labels = [f"ZeRO {row.strategy.zero}, recompute {row.strategy.recompute}, {row.context}" for row in rows]
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    if machine is not None:
        room = machine.usable_memory / 2**30
        axes.axvline(room, color="black", linestyle="--", linewidth=1, label=f"{machine.name}, usable")
        if max(left) > 3 * room:  # cut the longest bars, so that the others stay visible, and label them
            axes.set_xlim(0, 3.4 * room)
            for place, total in zip(places, left):
                if total > 3 * room:
                    axes.barh(place, total, left=3 * room, color="white", height=0.8)
                    axes.text(3.02 * room, place, f"// {total:,.0f} GiB", ha="left", va="center", fontsize=8)
    axes.set_xlabel("GiB per GPU at the peak; // marks bars that are longer than the picture")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, dpi=120)
