# SPDX-License-Identifier: Apache-2.0
"""``--dry-run``: the entry points simulate a step instead of training."""

from __future__ import annotations

import os
import sys
import time

from megatron.training.arguments.dry_run_flags import processes
from megatron.training.pretrain import EXIT_FAILED
from megatron.training.refusal import reason
from megatron.training.settings.config import Config


def simulate(config: Config) -> int:
    """Simulate one step of this program on a cluster and report it; returns the exit code, 1 if it does not fit."""
    from rich.console import Console

    from megatron.simulator.cost.jitter import Jitter
    from megatron.simulator.dry_run.dry_run import dry_run
    from megatron.simulator.dry_run.dry_run_report import check_output, show, write
    from megatron.simulator.dry_run.one_rank import vocabulary_of
    from megatron.simulator.machines.machine_file import load

    simulation = config.simulation
    machine = load(simulation.gpu) if simulation.gpu else None
    check_output(simulation.dry_run_json)
    vocab_size, assumed = vocabulary_of(config)
    console, started = Console(), time.perf_counter()
    for note in (*config.notes, *([assumed] if assumed else [])):
        console.print(f" > {note}", highlight=False, soft_wrap=True)
    with console.status("simulating"):
        result = dry_run(
            config,
            processes(config, int(os.environ.get("WORLD_SIZE", "1"))),
            machine,
            vocab_size=vocab_size,
            every_layer=simulation.dry_run_every_layer,
            workers=os.cpu_count() or 1,
        )
    show(result, console, Jitter(simulation.dry_run_jitter, config.run.seed) if simulation.dry_run_jitter else None)
    console.print(f" > simulated in {time.perf_counter() - started:.1f} s")
    if simulation.dry_run_json:
        try:
            written = write(result, simulation.dry_run_json, simulation.dry_run_trace_events)
            console.print(f" > wrote {', '.join(written)}", soft_wrap=True)
        except OSError as error:  # the tables have been printed
            where = error.filename or simulation.dry_run_json
            print(f"error: --dry-run-json: {where} cannot be written: {reason(error)}", file=sys.stderr)
            return EXIT_FAILED
    return EXIT_FAILED if result.fits is False else 0
