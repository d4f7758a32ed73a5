# SPDX-License-Identifier: Apache-2.0
"""Plans as a table, as JSON and as a command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron.formulas.strategy import Strategy
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner.command import environment, launcher, training_flags
from megatron.simulator.planner.plans import Plan, Problem
from megatron.simulator.planner.request import JOB, Request
from megatron.simulator.planner.run import Run
from megatron.simulator.planner.words import GIB, count, grid_words, losing, saving_words, winning


@dataclass(frozen=True)
class Report:
    """Ranked plans of a request; ``run``: what is known of the whole run of the first."""

    request: Request
    problem: Problem
    plans: list[Plan]
    run: Run | None = None

    def program(self, strategy: Strategy) -> list[str]:
        """Program and flags, without the launcher."""
        length = self.problem.workload.seq_length
        flags = training_flags(self.problem.workload, strategy)
        return [self.request.entry, *self.request.program_flags(length), *flags, *self._job()]

    def _job(self) -> list[str]:
        job = JOB[2:]
        if self.run:
            job[job.index("--train-iters") + 1] = str(self.run.steps)
            if self.run.save_interval:
                job += ["--save", "checkpoints", "--save-interval", str(self.run.save_interval)]
        return job

    def command(self, strategy: Strategy) -> str:
        """A line for a shell; variables in it are the shell's."""
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
        axes = {name: getattr(s, name) for name in ("tensor", "ulysses", "ring", "data", "pipeline")}
        return axes | {
            "zero": s.zero,
            "recompute": s.recompute,
            "fpdt_chunk": s.fpdt_chunk,
            "offload": s.offload_checkpoints or bool(s.fpdt_chunk and s.fpdt_offload),
            "recompute_method": s.recompute_method if s.recompute == "full" else None,
            "recompute_layers": s.recompute_layers if s.recompute == "full" else 0,
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
        problem = self.problem
        title = (
            f"{self.name()} at {count(problem.workload.seq_length)} tokens on {problem.gpus} x {problem.machine.name}, "
            f"global batch {problem.workload.global_batch}{problem.node_words}"
        )
        table = Table(title=title, title_justify="left")
        for column in ("", "grid", "micro-batch", "ZeRO", "saves memory by"):
            table.add_column(column, justify="right" if column in ("", "micro-batch", "ZeRO") else "left")
        for column in ("a step", "MFU", "GiB", "to OOM", "host, GiB"):
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
