# SPDX-License-Identifier: Apache-2.0
"""The longest sequences of FPDT and other systems (tables 1 and 3, figures 1 and 11 of the FPDT paper), simulated.

Device memory is that of this project's program (formulas/device_memory.py) with the paper's settings: batch 1, full
recompute with layer inputs in host memory, ZeRO 3 over all ranks, chunks of 64K tokens. Lengths are powers of two,
as in the paper except for its 3M. A node has 4 GPUs and 1 TB of host memory. The paper does not describe its nodes of
A100-40G; ours are DGX A100 with 8 GPUs.

GPT models have rotary positions here, as in the launch scripts of the published program: a learned table of 8M rows
would be larger than the model. The 30B has 64 heads of 112, because OPT's 56 heads do not divide over 16 ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from examples.reproduce.capacity import AT_LEAST, longest_power
from examples.reproduce.fpdt import training
from examples.reproduce.report import Row, published
from examples.reproduce.simulate import Simulated, cluster
from megatron.formulas.device_memory import Memory, device_memory
from megatron.formulas.parameters import stage_parameters
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load

K, MIB, GIB = 1024, 2**20, 2**30
SPIKES = "perhaps because of memory spikes when ZeRO 3 sums gradients (section 6), which ours does not have"


@dataclass(frozen=True)
class Run:
    """A model on GPUs, and differences from the paper's description.

    Attributes:
        adam_on_host: Adam's two states are in host memory, 8 bytes per parameter.
        assumed: the note of the row.
    """

    shape: Shape
    machine: Machine
    strategy: Strategy
    adam_on_host: bool = False
    assumed: str = ""


def machine_of(gpu: str) -> Machine:
    """The machine of a GPU; for A100-80G with the paper's node."""
    return cluster("fpdt-a100") if gpu == "A100-80G" else load(gpu)


def shape_of(model: str) -> Shape:
    return replace(training.shape(model), positions=0)


def memory(run: Run, seq_length: int) -> Memory:
    """Memory of a rank with one sequence per step."""
    result = device_memory(Workload(run.shape, seq_length), run.strategy)
    if run.adam_on_host:
        result = replace(result, optimizer=0, host=result.host + result.optimizer)
    return result


def fits(run: Run, seq_length: int) -> bool:
    """Whether a rank of the run fits in the GPU and, with the node's other ranks, in the node's host memory."""
    held, ranks = memory(run, seq_length), min(run.machine.gpus, run.strategy.ranks)
    return held.total <= run.machine.usable_memory and held.host * ranks <= run.machine.host_memory


def longest(run: Run) -> int:
    """The longest length in tokens; 0: not even 4K fits."""
    return longest_power(partial(fits, run))


def stopped_by(run: Run, seq_length: int) -> str:
    """The memory that ``2 * seq_length`` would exceed."""
    held = memory(run, 2 * seq_length)
    if held.total > run.machine.usable_memory:
        return f"{length_text(2 * seq_length)} would take {held.total / GIB:.0f} GiB of the GPU"
    ranks = min(run.machine.gpus, run.strategy.ranks)
    return f"{length_text(2 * seq_length)} would take {held.host * ranks / 1e12:.2f} TB of the node's host memory"


def further(ours: int, theirs: int) -> str:
    """The note of a row where ours is more than twice the published length; otherwise empty."""
    return f"ours is {ours / theirs:.0f} times as long: {SPIKES}" if ours > 2 * theirs else ""


def length_text(tokens: int) -> str:
    return f"{tokens // MIB}M" if tokens >= MIB else f"{tokens // K}K"


def fpdt(shape: Shape, gpus: int, tensor: int = 1) -> Strategy:
    """FPDT over all GPUs: the largest Ulysses degree that divides the heads, and Ring for the rest."""
    ulysses = gpus // tensor
    while shape.heads // tensor % ulysses:
        ulysses //= 2
    chosen = training.strategy("fpdt", ulysses)
    return replace(chosen, tensor=tensor, ring=gpus // tensor // ulysses, offload_checkpoints=True)


def table_1_run(model: str, gpu: str, gpus: int) -> Run:
    """A row of table 1. Two rows could not have run as stated, and need an assumption."""
    run = Run(shape_of(model), machine_of(gpu), fpdt(shape_of(model), gpus))
    if run.strategy.ring > 1:
        grid = f"Ulysses {run.strategy.ulysses} x Ring {run.strategy.ring}"
        run = replace(run, assumed=f"{run.shape.heads} heads: {grid}")
    if (model, gpu, gpus) == ("gpt-2.7b", "A100-40G", 1):
        why = "ASSUMED: Adam's states in host memory; 16 bytes per parameter, 42 GB, exceed the GPU's memory"
        return replace(run, adam_on_host=True, assumed=why)
    if (model, gpus) == ("llama3-70b", 16):
        why = "ASSUMED: TP 4 x Ulysses 4; with 71 GB of model states, complete layers do not fit"
        return replace(run, strategy=fpdt(run.shape, gpus, tensor=4), assumed=why)
    return run


def table_1_rows() -> list[Row]:
    rows = []
    for line in published("fpdt_table_1_max_context"):
        run = table_1_run(line["model"], line["gpu"], line["gpus"])
        ours, label = longest(run), {key: line[key] for key in ("model", "gpu", "gpus")}
        theirs, tested = line["max_context_tokens"], line["only_tested_to_this"] == "yes"
        notes = [AT_LEAST if tested else further(ours, theirs), run.assumed, stopped_by(run, ours)]
        rows.append(Row(label, theirs, ours, "simulated", "tokens", "; ".join(filter(None, notes))))
    return rows


def system(model: str, name: str, gpus: int) -> Run:
    """A system of figure 11. Megatron-SP uses TP over all GPUs, with sequence parallelism."""
    if name == "fpdt":
        return Run(shape_of(model), cluster("fpdt-a100"), fpdt(shape_of(model), gpus))
    chosen = replace(training.strategy(name, gpus), zero=0 if name == "megatron-sp" else 3, offload_checkpoints=True)
    return Run(shape_of(model), cluster("fpdt-a100"), chosen)


def figure_11_rows(models: Sequence[str] = training.MODELS, *, per_gpu: bool = False) -> list[Row]:
    """The last length of each system in figure 11, after which it is out of memory or not shown.

    Args:
        per_gpu: divide lengths by the number of GPUs, as in figure 1.
    """
    rows = []
    for line in sorted(training.longest_shown(models), key=lambda line: models.index(line["model"])):
        model, name, gpus = line["model"], line["system"], line["gpus"]
        run = system(model, name, gpus)
        ours, theirs, parts = longest(run), line["seq_length"], gpus if per_gpu else 1
        label = {"model": model, "gpus": gpus, "system": name}
        note = "; ".join(filter(None, (further(ours, theirs), stopped_by(run, ours))))
        rows.append(Row(label, theirs // parts, ours // parts, "simulated", "tokens", note))
    return rows


# Table 3: Llama-3-8B on 8 A100-80G.

TP_ALONE = "without Megatron's sequence parallelism, which the paper's column does not mention"
ZERO_1 = (
    "ASSUMED: DeepSpeed's ZeRO 1 has no gradient buffers, and no gradients at the memory peak: counted as our ZeRO 2"
)


def table_3_strategy(line: dict, zero: int | None = None) -> Strategy:
    """The strategy of a row; ``zero`` replaces its stage."""
    return Strategy(
        tensor=line["tensor_parallel"],
        ulysses=8 if line["ulysses"] == "yes" else 1,
        zero=line["zero"] if zero is None else zero,
        recompute="full" if line["checkpoint"] == "yes" else "none",
        offload_checkpoints=line["checkpoint_offload"] == "yes",
        fpdt_chunk=training.CHUNK if line["fpdt"] == "yes" else 0,
        sequence_parallel=False,
    )


def table_3_name(line: dict) -> str:
    names = ["TP"] if line["tensor_parallel"] > 1 else ["Ulysses", f"ZeRO-{line['zero']}"]
    names += ["AC"] * (line["checkpoint"] == "yes") + ["OC"] * (line["checkpoint_offload"] == "yes")
    return " ".join(names + ["FPDT"] * (line["fpdt"] == "yes"))


def table_3_rows() -> list[Row]:
    """For each row of the paper: the longest sequence, and device memory and MFU at the published length."""
    machine, shape, rows = machine_of("A100-80G"), shape_of("llama3-8b"), []
    speeds = training.table_3_rows(Simulated(machine))
    for line, speed in zip(published("fpdt_table_3_strategies"), speeds, strict=True):
        label, length = {"strategy": table_3_name(line)}, line["max_context_tokens"]
        as_named = Run(shape, machine, table_3_strategy(line))
        run, notes = as_named, []
        if line["zero"] == 1:
            run = Run(shape, machine, table_3_strategy(line, zero=2))
            core = f"megatron-core's ZeRO 1, ours: {memory(as_named, length).total / GIB:.1f} GiB"
            notes = [ZERO_1, f"{core}, at most {length_text(longest(as_named))}"]
        elif line["tensor_parallel"] > 1:
            with_it = Run(shape, machine, replace(run.strategy, sequence_parallel=True))
            notes = [TP_ALONE, f"with it {memory(with_it, length).total / GIB:.1f} GiB"]
        elif line["fpdt"] == "yes":
            notes = [_whole_states(run, length, line["hbm_gb"])]
        ours = longest(run)
        rows.append(Row(label, length, ours, "simulated", "tokens", stopped_by(run, ours)))
        gib = round(memory(run, length).total / GIB, 1)  # the paper's G is taken as GiB, as its program prints memory
        rows.append(Row(label, line["hbm_gb"], gib, "simulated", "GiB at that length", "; ".join(notes)))
        rows.append(replace(speed, label=label))
    return rows


def _whole_states(run: Run, length: int, published_gib: float) -> str:
    """Why ours needs less memory under FPDT: activations in units of a rank's complete hidden states."""
    held = memory(run, length)
    whole = 2 * length // run.strategy.context * run.shape.hidden
    theirs = published_gib * GIB - 16 * stage_parameters(run.shape, 1, 1, 0).numel / run.strategy.ranks
    ours = (held.activations + held.temporary) / whole
    return (
        f"on top of model states {theirs / whole:.0f} hidden states of {whole / 1e9:.1f} GB, ours {ours:.0f}: the "
        "published program keeps the tensors between attention, norms and FFN unchunked"
    )
