# SPDX-License-Identifier: Apache-2.0
"""How much memory a model needs, by ZeRO stage, recompute, context parallelism and FPDT: rows, a table, a picture."""

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
from megatron.training.arguments.config import ModelConfig
from megatron.training.arguments.models import model_shape, vocabulary
from megatron.training.arguments.models import shape as named_shape
from megatron.training.refusal import Refusal

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
COLORS = ("#4c72b0", "#55a868", "#8172b3", "#dd8452", "#937860")
SUFFIXES = {"K": 1, "M": 2, "G": 3, "B": 3, "T": 4}
FPDT_CHUNK = 65536


@dataclass(frozen=True)
class Row:
    """One way to train, and what its fullest rank holds."""

    strategy: Strategy
    memory: Memory
    fits: bool | None  # None: no GPU was named

    @property
    def context(self) -> str:
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
        Refusal: not a positive number with K, M, B or G after it.
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
    """A named model. Learned positions are as many as the sequence has tokens.

    Raises:
        Refusal: no such model; lists those there are.
    """
    settings = named_shape(name)
    model = ModelConfig(**{**settings, "model": name})
    if model.position_embedding_type == "learned_absolute" and not model.max_position_embeddings:
        model = replace(model, max_position_embeddings=seq_length)
    return model_shape(model, vocabulary(name))


def shape_of_size(parameters: int) -> Shape:
    """A Llama of about so many parameters: heads of 128, as many layers as heads, an MLP of 8/3, a vocabulary of 32K.

    Raises:
        Refusal: less than the smallest such model.
    """
    found = []
    for heads in range(2, 513):
        hidden = 128 * heads
        ffn = -(-hidden * 8 // 3 // 256) * 256
        found.append(Shape(heads, hidden, ffn, heads, heads, 128, 32000))
    best = min(found, key=lambda shape: abs(stage_parameters(shape, 1, 1, 0).numel - parameters))
    if best is found[0] and parameters < 0.8 * stage_parameters(best, 1, 1, 0).numel:
        raise Refusal(f"--params {parameters}: smaller than a Llama of two layers; use --model")
    return best


def strategies(shape: Shape, *, gpus: int, tensor: int, pipeline: int, seq_length: int) -> Iterator[Strategy]:
    """ZeRO stage x (data parallel alone, context parallel, with inputs offloaded, FPDT) x recompute.

    Ulysses goes up to the key/value heads of a TP rank, Ring takes the rest.

    Raises:
        Refusal: TP x PP does not divide the GPUs, TP the heads, or PP the layers.
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
    ulysses = gcd(max(shape.kv_heads // tensor, 1), ranks)
    context = {"ulysses": ulysses, "ring": ranks // ulysses}
    full: dict[str, Any] = {"recompute": "full"}
    chunk = min(FPDT_CHUNK, seq_length)
    ways: list[dict[str, Any]] = [{"data": ranks}, {"data": ranks, **full}]
    if ranks > 1:
        ways += [context, {**context, **full}]
    offload = {**context, **full, "offload_checkpoints": True}
    ways += [offload, {**offload, "fpdt_chunk": chunk}]
    for zero in range(4 if pipeline == 1 else 2):  # ZeRO 2 and 3 do not go with PP
        for way in ways:
            yield Strategy(tensor=tensor, pipeline=pipeline, zero=zero, **way)


def rows(
    shape: Shape,
    seq_length: int,
    found: Iterator[Strategy],
    *,
    itemsize: int = 2,
    machine: Machine | None = None,
) -> list[Row]:
    """What the fullest rank of the first or last pipeline stage holds, of each strategy."""
    result = []
    for strategy in found:
        # Enough sequences to fill the pipeline, and one for each data-parallel rank.
        workload = Workload(shape, seq_length, strategy.data * strategy.pipeline * strategy.micro_batch)
        stages = {0, strategy.pipeline - 1}
        memory = max(
            (device_memory(workload, strategy, itemsize=itemsize, stage=stage) for stage in stages),
            key=lambda memory: memory.total,
        )
        fits = None
        if machine is not None:
            room = machine.usable_memory
            fits = memory.total <= room and memory.host * machine.gpus <= machine.host_memory
        result.append(Row(strategy, memory, fits))
    return result


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f}"


def table(found: Sequence[Row], title: str) -> Table:
    """GiB of one rank."""
    result = Table(
        title=title,
        caption="GiB a GPU at the fullest moment (ZeRO 2, 3: few gradients are there then). Host: of the node's memory",
    )
    for name in ("ZeRO", "recompute", "sequence"):
        result.add_column(name)
    for name in (*KINDS, "total", "host"):
        result.add_column(name, justify="right")
    if any(row.fits is not None for row in found):
        result.add_column("fits")
    before = None
    for row in found:
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
    """The memory page's formulas for this model, and its table for Qwen2: printed, and by its own formula."""
    numel = stage_parameters(shape, 1, 1, 0).numel
    workload = Workload(shape, seq_length)
    ours = device_memory(workload, Strategy(zero=0))
    one = Table(title="one GPU, without savings: the memory page's formulas beside ours", caption="GiB")
    for name in ("", "the page", "ours", "why they differ"):
        one.add_column(name, justify="left" if name in ("", "why they differ") else "right")
    states = ours.parameters + ours.gradients + ours.optimizer
    page = papers_activations(shape.layers, 1, seq_length, shape.hidden, shape.heads)
    one.add_row("model states", gib(papers_states(numel)), gib(states), "our gradients are fp32: 18 bytes, not 16")
    one.add_row(
        "activations",
        gib(page),
        gib(ours.activations),
        "flash attention keeps no square; the page counts neither logits nor what comes and goes",
    )
    qwen = Table(title="activations of Qwen2 at 4,096 tokens (GB): linear + quadratic term")
    for name in ("model", "printed", "by the page's formula", "what gives the printed numbers"):
        qwen.add_column(name, justify="left" if name == "model" else "right")
    for row in QWEN2:
        pairs = (row.linear, row.square), row.formula, row.as_printed
        qwen.add_row(row.name, *(f"{linear:,.1f} + {square:,.1f}" for linear, square in pairs))
    qwen.caption = "the last: 33 L bsd, and 8 bs^2H of one layer; the linear term of 7B is printed as 3.9, not 13.6"
    return [one, qwen]


def draw(found: Sequence[Row], title: str, path: Path, machine: Machine | None = None) -> None:
    """Stacked bars, one a row, with the GPU's memory as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.4 + 0.27 * len(found)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(found))
    left = [0.0] * len(found)
    for kind, color in zip(KINDS, COLORS):
        sizes = [getattr(row.memory, kind) / 2**30 for row in found]
        axes.barh(places, sizes, left=left, color=color, label=kind, height=0.75)
        left = [a + b for a, b in zip(left, sizes)]
    labels = [f"ZeRO {row.strategy.zero}, recompute {row.strategy.recompute}, {row.context}" for row in found]
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    if machine is not None:
        room = machine.usable_memory / 2**30
        axes.axvline(room, color="black", linestyle="--", linewidth=1, label=f"{machine.name}, usable")
        if max(left) > 3 * room:  # the few longest bars would leave the others no width: they break off, and say so
            axes.set_xlim(0, 3.4 * room)
            for place, total in zip(places, left):
                if total > 3 * room:
                    axes.barh(place, total, left=3 * room, color="white", height=0.8)
                    axes.text(3.02 * room, place, f"// {total:,.0f} GiB", ha="left", va="center", fontsize=8)
    axes.set_xlabel("GiB a GPU at the fullest moment; // where a bar goes on beyond the picture")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
