#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plan a training run: the fastest grid and memory savings that fit on some GPUs, why, and the command that starts it.

    python tools/plan.py --model llama3-8b --gpus 16 --gpu A800-80G --seq-length 120K
    python tools/plan.py --model llama3-8b --gpus 4 --gpu A100-80G --longest

Model flags are those of pretrain_gpt.py: --model NAME, or sizes (--num-layers 32 --hidden-size 4096 ... --vocab-size),
then of a Llama. Counts may end in K (1024) or M (1024 K). Options about the strategy narrow the search.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner import confirm as plan_confirm
from megatron.simulator.planner import limits as plan_limits
from megatron.simulator.planner import picture as plan_picture
from megatron.simulator.planner.report import Report
from megatron.simulator.planner.request import Request, tokens
from megatron.simulator.planner.search import Problem, everything, search
from megatron.simulator.planner.search_space import Limits
from megatron.simulator.planner.words import alternatives, count, failing, losing, winning, words
from megatron.training.arguments.models import shape
from megatron.training.refusal import Refusal, Refusals

SIZES = ("tensor", "ulysses", "ring", "data", "pipeline", "virtual", "micro_batch")
EXIT_REFUSED = 2
TRIES = 3  # dry runs of --confirm


def main(argv: list[str] | None = None) -> int:
    args, flags = parser().parse_known_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    try:
        request, problem = asked(args, flags)
        if args.longest:
            problem = longest(request, problem, console)
        report(request, problem, args, console)
    except Refusal as refusal:
        told = Refusals(refusal.lines) if isinstance(refusal, Refusals) else refusal  # without a command of training
        print(f"error: {told.told()}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    found.add_argument("--model", metavar="NAME", help="named shape, for example llama3-8b")
    found.add_argument("--gpus", required=True, metavar="N", help="how many")
    found.add_argument("--gpu", required=True, metavar="NAME", help="which: a known name, or a file (docs/hardware.md)")
    found.add_argument("--seq-length", metavar="N", help="tokens of a sequence")
    found.add_argument("--longest", action="store_true", help="the longest sequence that fits, and its plan")
    found.add_argument("--global-batch", default="1", metavar="N", help="sequences a step (1)")
    found.add_argument("--top", default="10", metavar="N", help="plans to show (10), each the best of its grid")
    found.add_argument("--json", metavar="FILE", help="write all ranked plans")
    found.add_argument("--output", metavar="FILE.png", help="draw time and memory of all plans")
    found.add_argument("--confirm", action="store_true", help="one simulated step of the winner, by the real program")
    narrow = found.add_argument_group("narrow the search")
    sizes = {"nargs": "+", "metavar": "N"}
    narrow.add_argument("--tensor", **sizes, help="sizes of TP to try")
    narrow.add_argument("--ulysses", **sizes, help="of Ulysses")
    narrow.add_argument("--ring", **sizes, help="of Ring")
    narrow.add_argument("--data", **sizes, help="of DP")
    narrow.add_argument("--pipeline", **sizes, help="of PP")
    narrow.add_argument("--virtual", **sizes, help="virtual pipeline stages a rank")
    narrow.add_argument("--micro-batch", **sizes, help="sequences a forward pass (1, 2, 4, 8, 16)")
    narrow.add_argument("--zero", nargs="+", type=int, choices=range(4), help="stages of ZeRO to try")
    narrow.add_argument("--recompute", nargs="+", choices=("none", "selective", "full"), help="what to recompute")
    narrow.add_argument("--fpdt-chunk", nargs="+", metavar="N", help="FPDT with one of these chunks, in tokens")
    narrow.add_argument("--no-fpdt", action="store_true", help="no FPDT")
    narrow.add_argument("--no-offload", action="store_true", help="nothing goes to host memory")
    narrow.add_argument("--no-loss-chunks", action="store_true", help="the loss in one piece, but for FPDT")
    narrow.add_argument("--no-overlap", action="store_true", help="gradients and weights do not travel beside compute")
    return found


def asked(args: argparse.Namespace, flags: list[str]) -> tuple[Request, Problem]:
    """What is to be planned.

    Raises:
        Refusal: an option is wrong by itself or with others.
    """
    if args.model:
        shape(args.model)  # refuses unknown ones by listing the known
        flags = ["--model", args.model, *flags]
    if args.longest == bool(args.seq_length):
        raise Refusal("give either --seq-length N or --longest")
    if args.no_fpdt and args.fpdt_chunk:
        raise Refusal("--no-fpdt and --fpdt-chunk exclude each other: leave one out")
    machine, gpus = load(args.gpu), tokens(args.gpus, "--gpus")
    if gpus > machine.gpus and gpus % machine.gpus:
        below = gpus // machine.gpus * machine.gpus
        raise Refusal(
            f"--gpus {gpus} is no whole number of nodes of {machine.gpus} {machine.name}: use {below} or "
            f"{below + machine.gpus}, or give --gpu a file with another number of gpus (docs/hardware.md)"
        )
    request = Request(tuple(flags), tokens(args.global_batch, "--global-batch"))
    length = tokens(args.seq_length, "--seq-length") if args.seq_length else 1024
    return request, Problem(request.workload(length), gpus, machine, limits(args))


def limits(args: argparse.Namespace) -> Limits:
    chunks = (0,) if args.no_fpdt else whole(args.fpdt_chunk, "--fpdt-chunk")
    return Limits(
        **{name: whole(getattr(args, name), "--" + name.replace("_", "-")) for name in SIZES},
        zero=tuple(args.zero) if args.zero else None,
        recompute=tuple(args.recompute) if args.recompute else None,
        fpdt_chunk=chunks,
        offload=not args.no_offload,
        loss_chunks=not args.no_loss_chunks,
        overlap=not args.no_overlap,
    )


def whole(texts: list[str] | None, flag: str) -> tuple[int, ...] | None:
    return None if texts is None else tuple(sorted({tokens(text, flag) for text in texts}))


def longest(request: Request, problem: Problem, console: Console) -> Problem:
    """The problem at the longest sequence that fits."""
    power, length = plan_limits.longest(problem, request.workload)
    if not power:
        raise nothing_fits(problem)  # not even the shortest
    console.print(
        f"The longest power of two that fits is [bold]{count(power)}[/bold] tokens; in sixteenths of it, "
        f"[bold]{count(length)}[/bold]. The plan for {count(length)}:\n"
    )
    return replace(problem, workload=request.workload(length))


def report(request: Request, problem: Problem, args: argparse.Namespace, console: Console) -> None:
    top = tokens(args.top, "--top")
    found = search(problem, top)
    if not found.plans:
        raise nothing_fits(problem)
    told, winner = Report(request, problem, found.plans), found.plans[0]
    console.print(told.table(top))
    console.print(f"\n[bold]Why the first.[/bold] {winning(winner, problem)}\n")
    others = alternatives(winner, problem, found.known)
    if others:
        console.print("[bold]Why no other.[/bold]")
    for line in others:
        console.print(f"- {line}")
    console.print("\n[bold]Start it[/bold]" + (" on every node:" if problem.gpus > problem.gpus_per_node else ":"))
    console.print(told.command(winner.strategy), soft_wrap=True)
    if args.json:
        write(args.json, json.dumps(told.rows(), indent=2) + "\n")
    if args.output:
        plan_picture.draw(found, problem, args.output, told.name())
    if args.confirm:
        confirm(told, args.gpu, console)


def confirm(told: Report, gpu: str, console: Console) -> None:
    """Dry runs of the winner and, where it does not fit after all, of plans that take less memory."""
    problem, plan = told.problem, told.plans[0]
    for _ in range(TRIES):
        done = plan_confirm.confirm(told, plan, gpu)
        console.print()
        console.print(done.table())
        if done.fits:
            return
        problem = done.narrowed(problem)
        found = search(problem, top=1)
        if not found.plans or found.plans[0].strategy == plan.strategy:
            break
        plan = replace(found.plans[0], room=told.problem.machine.usable_memory)
        console.print(
            "\nBy the dry run it does not fit. With what that took more set aside, the best is "
            f"{words(plan.strategy)}, {losing(plan, told.plans[0])}:\n{told.command(plan.strategy)}",
            soft_wrap=True,
        )
    raise Refusal(
        "--confirm: no plan was found that fits by its dry run as well: use more --gpus, or a smaller problem"
    )


def write(name: str, text: str) -> None:
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(f"--json {name}: cannot be written: {error.strerror or error}") from None


def nothing_fits(problem: Problem) -> Refusal:
    """Why there is no plan, and what would help."""
    machine = problem.machine
    if next(everything(problem), None) is None:
        return Refusal(no_grid(problem))
    near = plan_limits.nearest(problem)
    text = f"--gpus {problem.gpus}: nothing fits"
    if near is not None:
        lack = failing(near, None, problem)
        text += f" on {problem.gpus} x {machine.name}; what comes nearest, {words(near.strategy)}, {lack}"
    fewest = plan_limits.fewest_gpus(problem)
    if fewest is None:
        return Refusal(f"{text}. No number of GPUs would do: use a shorter --seq-length, or fewer options")
    return Refusal(f"{text}. The smallest number of GPUs that would do is --gpus {fewest}")


def no_grid(problem: Problem) -> str:
    workload = problem.workload
    if next(everything(replace(problem, limits=Limits())), None) is not None:
        return f"nothing for --gpus {problem.gpus} is left by the options that narrow the search: leave one out"
    return (
        f"no grid splits --seq-length {workload.seq_length} and --global-batch {workload.global_batch} of this model "
        f"({workload.shape.heads} heads, {workload.shape.layers} layers) evenly over --gpus {problem.gpus}: use "
        f"a multiple of {2 * problem.gpus} as --seq-length, or a multiple of {problem.gpus} as --global-batch"
    )


if __name__ == "__main__":
    sys.exit(main())
