# SPDX-License-Identifier: Apache-2.0
"""The grid of an elastic run: the fastest that fits, with the ways to save memory that its flags name."""

from __future__ import annotations

from dataclasses import replace

from megatron.training.arguments.config import Config


def fastest(configs: list[Config], world_size: int) -> int | None:
    """The index of the configuration that takes the least time on so many of its ``--gpu``; None: none fits.

    Of those that take the same time to one part in a thousand, the one with the most memory to spare.

    Args:
        configs: of one run on different grids, completed.

    Raises:
        Refusal: the GPU is not known.
    """
    from megatron.simulator.dry_run.vocabulary import vocabulary_of
    from megatron.simulator.machines.machine_file import load
    from megatron.simulator.planner.plans import Problem, better, priced
    from megatron.training.arguments.strategy_of import strategy_of, workload_of

    machine, best = load(configs[0].simulation.gpu), None
    vocab_size, _ = vocabulary_of(configs[0])
    for index, config in enumerate(configs):
        strategy = strategy_of(config)
        strategy = replace(strategy, data=world_size // strategy.ranks)
        workload = workload_of(config, vocab_size)
        plan = priced(Problem(workload, world_size, machine), strategy)
        if plan.fits and (best is None or better(plan, best[1])):
            best = index, plan
    return None if best is None else best[0]
