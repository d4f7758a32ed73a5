# SPDX-License-Identifier: Apache-2.0
"""Plans as a table, as JSON, as a command and as a picture."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron.decisions.key_exchange import PASSED_ON
from megatron.formulas.strategy import Strategy, Workload
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner.explain import GIB, count, grid_words, losing, saving_words, winning
from megatron.simulator.planner.plans import Plan, Problem, priced
from megatron.simulator.planner.request import JOB, Request
from megatron.simulator.planner.run_cost import Run
from megatron.simulator.planner.search import SearchResult, all_strategies
from megatron.system.whole_file import save_figure
from megatron.training.refusal import Refusal, reason
from megatron.training.report.memory_picture import INK, pyplot_for_files


def training_flags(workload: Workload, strategy: Strategy) -> list[str]:
    """Batch, length, grid and memory savings as flags of the training programs."""
    s = strategy
    flags = ["--seq-length", str(workload.seq_length)]
    flags += ["--micro-batch-size", str(s.micro_batch), "--global-batch-size", str(workload.global_batch), "--bf16"]
    if s.tensor > 1:
        flags += ["--tensor-model-parallel-size", str(s.tensor), *(["--sequence-parallel"] * s.sequence_parallel)]
    flags += ["--ulysses-parallel-size", str(s.ulysses), "--ring-parallel-size", str(s.ring)]
    flags += ["--cp-comm-type", s.key_exchange] * (s.key_exchange != PASSED_ON)
    if s.pipeline > 1:
        flags += ["--pipeline-model-parallel-size", str(s.pipeline)]
    if workload.shape.mixture:
        flags += ["--expert-model-parallel-size", str(s.expert), "--expert-tensor-parallel-size", "1"]
        flags += ["--moe-token-dispatcher-type", "alltoall"]
    flags += uneven_stages(workload.shape.layers, s)
    if s.virtual > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(s.virtual)]
    flags += ["--zero-stage", str(s.zero)]
    if s.zero <= 1 and s.group("dp").size > 1:
        flags += ["--overlap-grad-reduce"] * s.overlap_grad_reduce
        flags += ["--overlap-param-gather"] * (s.zero == 1 and s.overlap_grad_reduce and s.overlap_param_gather)
    return flags + _saving_flags(s)


def uneven_stages(layers: int, s: Strategy) -> list[str]:
    """Flags for stages of different lengths.

    Embedding and loss count as layers if that is enough; otherwise the numbers of layers are given.
    """
    if max(s.first_less, s.last_less) <= 1:
        flags = ["--account-for-embedding-in-pipeline-split"] * s.first_less
        return flags + ["--account-for-loss-in-pipeline-split"] * s.last_less
    ends = (("first", s.first_less, 0), ("last", s.last_less, s.pipeline - 1))
    given = [(end, s.stage_layers(layers, stage)) for end, less, stage in ends if less]
    return [word for end, count in given for word in (f"--decoder-{end}-pipeline-num-layers", str(count))]


def _saving_flags(s: Strategy) -> list[str]:
    flags = []
    if s.recompute != "none":
        flags += ["--recompute-granularity", s.recompute]
    if s.recompute == "full":
        flags += ["--recompute-method", s.recompute_method, "--recompute-num-layers", str(s.recompute_layers)]
    flags += ["--keep-attention"] * s.keep_attention
    if s.fpdt_chunk:
        flags += ["--fpdt", "--fpdt-chunk-size", str(s.fpdt_chunk), *([] if s.fpdt_offload else ["--no-fpdt-offload"])]
    flags += ["--fpdt-stream-hidden"] * s.stream_hidden
    flags += ["--offload-checkpoints"] * s.offload_checkpoints
    for flag, pieces in (("--ffn-chunks", s.ffn_chunks), ("--loss-chunks", s.loss_chunks)):
        flags += [flag, str(pieces)] if pieces else []
    return flags


def launcher(gpus: int, gpus_per_node: int) -> list[str]:
    """The torchrun command to start on every node; with several nodes it reads NODE_RANK and MASTER_ADDR."""
    words = ["torchrun", "--nproc-per-node", str(gpus_per_node)]
    if gpus > gpus_per_node:
        words += ["--nnodes", str(gpus // gpus_per_node), "--node-rank", "$NODE_RANK"]
        words += ["--master-addr", "$MASTER_ADDR", "--master-port", "6000"]
    return words


def environment(strategy: Strategy) -> list[str]:
    """Environment variables for the command.

    With one connection, TP's transfers start before the products that they overlap (Megatron-LM requires it); FSDP
    needs several connections.
    """
    one = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if strategy.tensor > 1 and strategy.zero < 2 else []
    return [*one, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]


PAIRS = (  # in place of random tokens
    "--data-path pairs.jsonl --tokenizer-type HuggingFaceTokenizer --tokenizer-model model --load model --finetune"
).split()


@dataclass(frozen=True)
class Report:
    """Ranked plans of a request."""

    request: Request
    problem: Problem
    plans: list[Plan]
    run: Run | None = None  # time and cost of the complete run with the first plan

    def program(self, strategy: Strategy) -> list[str]:
        """Program and flags, without the launcher."""
        length = self.problem.workload.seq_length
        flags = training_flags(self.problem.workload, strategy)
        return [self.request.entry, *self.request.program_flags(length), *flags, *self._job()]

    def _job(self) -> list[str]:
        job = JOB[2:]
        if self.request.reference:
            job[job.index("--mock-data") :] = PAIRS
        if self.run:
            job[job.index("--train-iters") + 1] = str(self.run.steps)
            if self.run.save_interval:
                job += ["--save", "checkpoints", "--save-interval", str(self.run.save_interval)]
        return job

    def command(self, strategy: Strategy) -> str:
        """A command line for a shell, with shell variables."""
        words = [*launcher(self.problem.gpus, self.problem.gpus_per_node), *self.program(strategy)]
        quoted = (word if word.startswith("$") else shlex.quote(word) for word in words)
        return " ".join([*environment(strategy), *quoted])

    def reason(self, plan: Plan) -> str:
        winner = self.plans[0]
        return winning(plan, self.problem) if plan is winner else losing(plan, winner)

    def rows(self) -> list[dict[str, Any]]:
        """The JSON of ``tools/plan.py --json``; ``host_bytes`` are of one GPU, ``margin_bytes`` of the device."""
        return [self._row(plan) for plan in self.plans]

    def _row(self, plan: Plan) -> dict[str, Any]:
        s = plan.strategy
        axes = {name: getattr(s, name) for name in ("tensor", "ulysses", "ring", "expert", "data", "pipeline")}
        return axes | {
            "zero": s.zero,
            "recompute": s.recompute,
            "fpdt_chunk": s.fpdt_chunk,
            "offload": s.offload_checkpoints or bool(s.fpdt_chunk and s.fpdt_offload),
            "recompute_method": s.recompute_method if s.recompute == "full" else None,
            "recompute_layers": s.recompute_layers if s.recompute == "full" else 0,
            "keep_attention": s.keep_attention,
            "predicted_ms": 1e3 * plan.seconds,
            "mfu": plan.estimate.mfu,
            "device_peak_bytes": plan.memory.total,
            "command": self.command(s),
            "reason": self.reason(plan),
            "margin_bytes": int(plan.margin),
            "host_bytes": plan.memory.host,
            "micro_batch": s.micro_batch,
            "virtual": s.virtual,
            "fpdt_offload": bool(s.fpdt_chunk and s.fpdt_offload),
            "offload_checkpoints": s.offload_checkpoints,
            "loss_chunks": s.loss_chunks,
            "ffn_chunks": s.ffn_chunks,
            "stream_hidden": s.stream_hidden,
            "tight": plan.tight,
            "tokens_per_second": plan.estimate.tokens_per_second,
            "ring_imbalance": s.busiest(self.problem.workload),
            "seconds_by_part": plan.estimate.parts,
        }

    def table(self, top: int) -> Table:
        """The first ``top`` plans, with grid, memory savings, time and memory."""
        problem = self.problem
        title = (
            f"{self.name()} at {count(problem.workload.seq_length)} tokens on {problem.gpus} x {problem.machine.name}, "
            f"global batch {problem.workload.global_batch}{problem.node_words}"
        )
        table = Table(title=title, title_justify="left")
        for column in ("", "grid", "micro-batch", "ZeRO", "saves memory by"):
            table.add_column(column, justify="right" if column in ("", "micro-batch", "ZeRO") else "left")
        for column in ("step", "MFU", "GiB", "to OOM", "host, GiB"):
            table.add_column(column, justify="right", no_wrap=True)
        for number, plan in enumerate(self.plans[:top], 1):
            s, memory = plan.strategy, plan.memory
            grid = grid_words(s) + (f" ({s.virtual} virtual)" if s.virtual > 1 else "")
            fit = (f"{memory.total / GIB:.1f}", f"{plan.margin / GIB:.1f}", f"{memory.host / GIB:.1f}")
            sizes = (str(number), grid, str(s.micro_batch), str(s.zero), saving_words(s))
            table.add_row(*sizes, duration(plan.seconds), f"{100 * plan.estimate.mfu:.1f} %", *fit)
        return table

    def name(self) -> str:
        flags = self.request.flags
        return flags[flags.index("--model") + 1] if "--model" in flags else "a model"


# --- the picture of time against memory ---

MOST = 12000  # if there are more strategies, the picture shows only those that the search has priced
SLOWEST = 1.6  # slowest plan in the picture, as a multiple of the winner's time
BLUE, AMBER, RED, GREEN = "#0072b2", "#e69f00", "#cc6677", "#009e73"


def front(plans: list[Plan]) -> list[Plan]:
    """The Pareto front: plans that no other beats in both time and memory, by rising memory."""
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.memory.total, plan.seconds)):
        if not kept or plan.seconds < kept[-1].seconds:
            kept.append(plan)
    return kept


def draw(result: SearchResult, problem: Problem, output: str, model: str) -> None:
    """Write the picture: plans, their Pareto front, the memory limit and the winner.

    Raises:
        Refusal: the picture cannot be written.
    """
    pyplot = pyplot_for_files()
    winner, usable = result.plans[0], problem.machine.usable_memory / GIB
    figure, axes = pyplot.subplots(figsize=(9.5, 5.6), dpi=120, layout="constrained")
    every = [*result.fitting, *result.failing]
    if len(strategies := list(islice(all_strategies(problem), MOST))) < MOST:
        every = [priced(problem, strategy) for strategy in strategies]
    shown = [plan for plan in every if plan.seconds < SLOWEST * winner.seconds and plan.memory.total < 2 * usable * GIB]
    fitting = [plan for plan in shown if plan.fits]
    device = [plan for plan in shown if plan.margin < 0]
    host = [plan for plan in shown if plan.host_margin < 0 <= plan.margin]
    for plans, colour, name in (
        (fitting, BLUE, "fits"),
        ([plan for plan in shown if plan.tight], AMBER, "fits with too little to spare"),
        (device, RED, "does not fit on the device"),
        (host, GREEN, "does not fit in the node's host memory"),
    ):
        if plans:
            label = f"{name}: {len(plans)}"
            axes.scatter(*points(plans), s=16, color=colour, alpha=0.55, linewidths=0, label=label, zorder=2)
    axes.plot(*points(front(fitting)), color=BLUE, linewidth=1.2, label="fastest for its memory", zorder=3)
    axes.axvline(usable, color=INK, linewidth=1, linestyle="--")
    axes.text(usable, 0.99, f" {usable:.1f} GiB", transform=axes.get_xaxis_transform(), va="top", fontsize=9, color=INK)
    x, y = winner.memory.total / GIB, winner.seconds
    axes.scatter([x], [y], s=90, marker="*", color="#e69f00", edgecolor=INK, linewidth=0.6, zorder=4)
    saved = saving_words(winner.strategy)
    text = f"{grid_words(winner.strategy)}, ZeRO {winner.strategy.zero}" + (f"\n{saved}" if saved else "")
    axes.annotate(
        text, (x, y), (0, -10), textcoords="offset points", ha="center", va="top", fontsize=9, color=INK, zorder=5
    )
    slowest, fastest = (extreme(plan.seconds for plan in shown) for extreme in (max, min))
    span = slowest - fastest or slowest
    axes.set_ylim(fastest - 0.16 * span, slowest + 0.25 * span)
    axes.set_xlim(left=0)
    axes.set_xlabel("memory of the rank that needs most (GiB)", color=INK)
    axes.set_ylabel("predicted time of a step (s)", color=INK)
    length, batch = count(problem.workload.seq_length), problem.workload.global_batch
    title = f"{model}, {length} tokens, global batch {batch}, on {problem.gpus} x {problem.machine.name}"
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9, loc="upper left")
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        save_figure(figure, output)
    except (OSError, ValueError) as error:
        raise Refusal(f"--output {output}: cannot be written: {reason(error)}") from None
    finally:
        pyplot.close(figure)


def points(plans: list[Plan]) -> tuple[list[float], list[float]]:
    return [plan.memory.total / GIB for plan in plans], [plan.seconds for plan in plans]
