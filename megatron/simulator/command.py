# SPDX-License-Identifier: Apache-2.0
"""``--dry-run``: the entry points simulate a step instead of training. And advice when a GPU's memory has run out."""

from __future__ import annotations

import os
import sys
import time

from megatron.training.arguments.dry_run_flags import processes
from megatron.training.pretrain import EXIT_FAILED, Possible
from megatron.training.refusal import Refusal, reason
from megatron.training.settings.config import Config


def simulate(config: Config, possible: Possible | None = None) -> int:
    """Simulate one step of this program on a cluster and report it; returns the exit code, 1 if it does not fit.

    Args:
        possible: see `pretrain.Possible`.
    """
    from rich.console import Console

    from megatron.simulator.changes_that_fit import lines
    from megatron.simulator.cost.jitter import Jitter
    from megatron.simulator.dry_run.dry_run import dry_run
    from megatron.simulator.dry_run.dry_run_report import check_output, needed, show, write
    from megatron.simulator.dry_run.one_rank import vocabulary_of
    from megatron.simulator.machines.machine_file import load

    simulation = config.simulation
    machine = load(simulation.gpu) if simulation.gpu else None
    check_output(simulation.dry_run_json)
    vocab_size, assumed = vocabulary_of(config)
    console, started = Console(), time.perf_counter()
    for note in (*config.notes, *([assumed] if assumed else [])):
        console.print(f" > {note}", highlight=False, soft_wrap=True)
    ranks, changes = processes(config, int(os.environ.get("WORLD_SIZE", "1"))), []

    def advise(needed: float = 0.0) -> None:
        if machine is not None and machine.is_gpu and not changes:
            changes.extend(lines(config, ranks, machine, vocab_size, possible, needed))
            for line in changes:
                console.print(f" > {line}", highlight=False, soft_wrap=True)

    advise()  # the simulation may take minutes
    with console.status("simulating"):
        result = dry_run(
            config,
            ranks,
            machine,
            vocab_size=vocab_size,
            every_layer=simulation.dry_run_every_layer,
            workers=os.cpu_count() or 1,
        )
    show(result, console, Jitter(simulation.dry_run_jitter, config.run.seed) if simulation.dry_run_jitter else None)
    if result.fits is False:
        advise(max(min(needed(result, report).values(), default=0.0) for report in result.ranks))
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


def advise(config: Config, possible: Possible) -> list[str]:
    """After a GPU's memory has run out: the cheapest changes that fit on it; empty if its kind is not known."""
    import torch

    from megatron.simulator.changes_that_fit import lines
    from megatron.simulator.dry_run.one_rank import vocabulary_of
    from megatron.simulator.machines.machine_file import load

    try:
        machine = load(torch.cuda.get_device_name())
    except Refusal:
        return []
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    return lines(config, world_size, machine, vocabulary_of(config)[0], possible, machine.memory)
