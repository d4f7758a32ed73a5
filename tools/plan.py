#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
r"""Plan a training run: find the fastest grid and memory savings that fit on the given GPUs, and print the command.

    python tools/plan.py --model llama3-8b --gpus 16 --gpu A800-80G --seq-length 120K
    python tools/plan.py --model llama3-8b --gpus 4 --gpu A100-80G --longest
    python tools/plan.py --model llama3-8b --gpus 64 128 256 --gpu H100-80G --seq-length 128K --global-batch 64 \
        --train-tokens 300B --deadline 30d

Model flags are those of pretrain_gpt.py: --model NAME, or the sizes of a Llama (--num-layers 32 --hidden-size 4096 ...
--vocab-size). Counts may end in K (1024) or M (1024 K). Options about the strategy narrow the search.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import json
from dataclasses import replace
from math import ceil, gcd
from pathlib import Path

from rich.console import Console

from megatron.simulator.cost.jitter import Jitter, step_spread
from megatron.simulator.cost.jitter import describe as spread_words
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner import confirm as plan_confirm
from megatron.simulator.planner import explain
from megatron.simulator.planner import limits as plan_limits
from megatron.simulator.planner.limits import Offer, best_of, offers, offers_table, run_words
from megatron.simulator.planner.plan_report import Report
from megatron.simulator.planner.plans import Problem
from megatron.simulator.planner.request import Request, tokens
from megatron.simulator.planner.run_cost import Terms, run_of
from megatron.simulator.planner.search import NEAR, all_strategies, search
from megatron.simulator.planner.search_space import Limits
from megatron.system.whole_file import replace_file
from megatron.training.refusal import Refusal, Refusals, refusing
from tools.plan_options import MARGIN, parser, planning_problems, terms

EXIT_REFUSED = 2
SEED = 1234  # default of --seed
TRIES = 3  # limit of the dry runs of --confirm


def main(argv: list[str] | None = None) -> int:
    args, flags = parser(__doc__).parse_known_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    try:
        request, problems = planning_problems(args, flags)
        about = terms(args)
        if args.longest:
            problems = [longest(request, problems[0], console)]
        report(request, best_offer(problems, about, args, console), about, args, console)
    except Refusal as refusal:
        shown = Refusals(refusal.parts) if isinstance(refusal, Refusals) else refusal  # omit the training command
        print(f"error: {shown.render()}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def longest(request: Request, problem: Problem, console: Console) -> Problem:
    """The problem at the longest sequence that fits."""
    power, length = plan_limits.longest(problem, request.workload)
    if not power:
        raise nothing_fits(problem)  # not even the shortest sequence
    console.print(
        f"The longest power of two that fits is [bold]{explain.count(power)}[/bold] tokens; in steps of a sixteenth of "
        f"it, [bold]{explain.count(length)}[/bold]. The plan for {explain.count(length)}:\n"
    )
    return replace(problem, workload=request.workload(length))


def best_offer(problems: list[Problem], about: Terms | None, args: argparse.Namespace, console: Console) -> Offer:
    """The kind and number of GPUs that is best for the complete run if it is described, else for one step."""
    drawn = bool(args.output or args.html)
    choices = offers(problems, tokens(args.top, "--top"), about, near=NEAR if drawn else 1.0)
    if not choices:
        raise nothing_fits(problems[-1])
    best = best_of(choices, about)
    if best.plan.tight and args.margin != MARGIN:
        raise Refusal(too_little_left(best, args.margin))
    if len(problems) > 1:
        console.print(offers_table(choices, best, about))
        console.print()
    return best


def report(request: Request, offer: Offer, about: Terms | None, args: argparse.Namespace, console: Console) -> None:
    """Print the plans, the reasons for the first one and its command; write the files that the options name."""
    top, problem, results = tokens(args.top, "--top"), offer.problem, offer.results
    ranking, winner = Report(request, problem, offer.plans, offer.run), offer.plan
    console.print(ranking.table(top))
    if args.jitter:
        jitter = Jitter(args.jitter, SEED if args.seed is None else args.seed)
        for number, plan in enumerate(offer.plans[: min(top, 3)], 1):
            varied = step_spread(problem.workload, plan.strategy, problem.machine, jitter)
            console.print(f"{number}: {spread_words(varied, jitter)}.")
    if not results.plans:
        console.print(f"Nothing leaves the usual margin of {explain.gib(problem.spare)}: these plans fit with less.")
    for plan in results.tight[:3] if results.plans else ():
        why = f"{explain.losing(plan, winner)}; {explain.failing(plan, None, problem)}"
        console.print(f"With less memory left: {explain.words(plan.strategy)}, {why}.")
    console.print(f"\n[bold]Why the first.[/bold] {explain.winning(winner, problem)}\n")
    for hint in (
        request.beyond_words(problem.workload.seq_length),
        explain.uncertain_words(winner, problem),
        explain.padding_words(problem, winner),
        explain.uneven_words(problem, winner),
    ):
        if hint:
            console.print(f"{hint}.\n")
    others = explain.alternatives(winner, problem, results.known)
    if others:
        console.print("[bold]Why no other.[/bold]")
    for line in others:
        console.print(f"- {line}")
    if offer.run:
        console.print("\n[bold]The whole run.[/bold] " + run_words(offer.run, about))
    console.print("\n[bold]Start it[/bold]" + (" on every node:" if problem.gpus > problem.gpus_per_node else ":"))
    console.print(ranking.command(winner.strategy), soft_wrap=True)
    if args.json:
        write(args.json, json.dumps(ranking.rows(), indent=2) + "\n", "--json")
    if args.output:
        from megatron.simulator.planner import plan_report  # imports matplotlib

        plan_report.draw(results, problem, args.output, ranking.name())
    lasts, done = run_words(offer.run, about) if offer.run else "", None
    try:
        if args.confirm:
            gpu = next(name for name in args.gpu if load(name).name == problem.machine.name)
            done = confirm(ranking, gpu, console)
            if offer.run:
                lasts = run_words(run_of(done.plan, problem, about, done.seconds), about)
                console.print(f"\nAt the dry run's {duration(done.seconds)} a step: {lasts}")
    finally:
        if args.html:
            from megatron.simulator.planner.page import page

            write(args.html, page(ranking, results, others, lasts, done), "--html")


def confirm(ranking: Report, gpu: str, console: Console) -> plan_confirm.Confirmation:
    """Make a dry run of the best plan; if it does not fit after all, of plans that take less memory."""
    problem, plan = ranking.problem, ranking.plans[0]
    for _ in range(TRIES):
        done = plan_confirm.confirm(ranking, plan, gpu)
        console.print()
        console.print(done.table())
        if done.fits:
            if warning := plan_confirm.safer(done, ranking.problem):
                console.print(warning, soft_wrap=True)
            return done
        problem = done.narrowed(problem)
        results = search(problem, top=1)
        if not results.plans or results.plans[0].strategy == plan.strategy:
            break
        plan = replace(results.plans[0], room=ranking.problem.machine.usable_memory)
        console.print(
            "\nThe plan does not fit in the dry run. If the additional memory is set aside, the best plan is "
            f"{explain.words(plan.strategy)}, {explain.losing(plan, ranking.plans[0])}:\n"
            f"{ranking.command(plan.strategy)}",
            soft_wrap=True,
        )
    raise Refusal("--confirm: no plan was found that also fits in a dry run: use more --gpus, or a smaller problem")


def write(name: str, text: str, flag: str) -> None:
    with refusing(f"{flag} {name}: cannot be written", OSError):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        replace_file(name, text)


def nothing_fits(problem: Problem) -> Refusal:
    """Why there is no plan, and what would help."""
    machine = problem.machine
    if next(all_strategies(problem), None) is None:
        return Refusal(no_grid(problem))
    near = plan_limits.nearest(problem)
    text = f"--gpus {problem.gpus}: nothing fits"
    if near is not None:
        lack = explain.failing(near, None, problem)
        text += f" on {problem.gpus} x {machine.name}; the closest plan, {explain.words(near.strategy)}, {lack}"
    fewest = plan_limits.fewest_gpus(problem)
    if fewest is None:
        return Refusal(f"{text}. No number of GPUs is enough: use a shorter --seq-length, or fewer options")
    return Refusal(f"{text}. The smallest sufficient number is --gpus {fewest}")


def too_little_left(offer: Offer, margin: str) -> str:
    freest = max(offer.plans, key=lambda plan: plan.margin)
    left = int(100 * freest.margin / offer.problem.machine.memory)
    return (
        f"--margin {margin}: no plan leaves that much memory; {explain.words(freest.strategy)} leaves the most, "
        f"{explain.gib(freest.margin)}: use --margin {left}%, or more --gpus"
    )


def no_grid(problem: Problem) -> str:
    workload, unit = problem.workload, 2 * problem.gpus
    if next(all_strategies(replace(problem, limits=Limits())), None) is not None:
        left = f"the options that narrow the search leave no plan for --gpus {problem.gpus}: "
        padded = explain.padded_problem(problem)
        if padded is not problem and next(all_strategies(padded), None) is not None:
            length = padded.workload.seq_length
            unit = gcd(length, unit)
            return f"{left}pad to --seq-length {length}, a multiple of {unit}, or leave an option out"
        return f"{left}leave one out"
    return (
        f"no grid splits --seq-length {workload.seq_length} and --global-batch {workload.global_batch} of this model "
        f"({workload.shape.heads} heads, {workload.shape.layers} layers) evenly over --gpus {problem.gpus}: pad to "
        f"--seq-length {ceil(workload.seq_length / unit) * unit}, a multiple of {unit}, or use a multiple of "
        f"{problem.gpus} as --global-batch"
    )


if __name__ == "__main__":
    sys.exit(main())
