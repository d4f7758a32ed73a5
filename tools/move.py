#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Move a launch script of Megatron-LM to longer sequences: a plan, its dry run, its cost, and the script as a diff.

    python tools/move.py train_llama.sh --seq-length 128K --gpus 64 --gpu H100
    python tools/move.py train.sbatch --seq-length 1M --gpus 64 --gpu H100 --output train_1m.sbatch --html plans.html

The script is read as tools/check_script.py reads it, and not started. A step keeps its number of tokens, and the run
too. Words after -- are the script's arguments. The diff changes flags where the script has them, or the variables that
hold their values; the changed script is then read again. What the text does not show is left for you, in words.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import difflib
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatron.formulas.strategy import Strategy
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.planner import explain
from megatron.simulator.planner.confirm import Confirmation, confirm, safer
from megatron.simulator.planner.limits import run_words
from megatron.simulator.planner.plan_report import Report, training_flags
from megatron.simulator.planner.plans import Problem
from megatron.simulator.planner.request import Request, big_number, refuse_unplannable, share_of_memory
from megatron.simulator.planner.run_cost import Terms, read_prices, run_of
from megatron.simulator.planner.search import SearchResult, search
from megatron.simulator.planner.search_space import Limits
from megatron.system.whole_file import replace_file
from megatron.training.arguments.argv import flat, options
from megatron.training.arguments.stages import workload_of
from megatron.training.arguments.suggest import accepted
from megatron.training.pretrain import CORE
from megatron.training.refusal import Refusal, reason
from megatron.training.settings.config import Config
from tools.check_script import missing_files
from tools.longer_run import ROPE, Target, at_length, batches, positions_at, target_of, with_plan
from tools.moved_script import Job, job_of, place, rewritten, short_runs_folders
from tools.option_parser import OptionParser
from tools.plan import nothing_fits
from tools.plan_options import MARGIN
from tools.script_edits import with_allocator

PRICES = Path(__file__).parents[1] / "examples" / "planner" / "prices.json"
EXIT_REFUSED = 2


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    own = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:own])
    args.arguments = words[own + 1 :]
    warnings.filterwarnings("ignore", module=CORE)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return move(args, Path(folder), console)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or args.script}: {reason(error)}", file=sys.stderr)
    return EXIT_REFUSED


def parser() -> argparse.ArgumentParser:
    options = OptionParser(__doc__, allow_abbrev=False)
    options.add_argument(
        "script", type=Path, metavar="SCRIPT", help="the launch script; its own arguments follow after --"
    )
    options.add_argument("--seq-length", required=True, metavar="N", help="tokens of a sequence, such as 128K")
    options.add_argument("--gpus", required=True, metavar="N", help="number of GPUs")
    options.add_argument("--gpu", required=True, metavar="NAME", help="kind of GPU: a name, or a machine file")
    options.add_argument("--global-batch", metavar="N", help="sequences per step (as many tokens as the script's step)")
    options.add_argument("--vocab-size", type=int, metavar="N", help="if the tokenizer is not on this machine")
    options.add_argument("--rope", choices=ROPE, default="yarn", help="how rotary positions reach the length (yarn)")
    options.add_argument("--train-tokens", metavar="N", help="tokens of the run, for its cost (as the script's)")
    options.add_argument("--prices", type=Path, default=PRICES, metavar="FILE", help="JSON, as of tools/plan.py")
    options.add_argument("--no-dry-run", action="store_true", help="the plan alone, in seconds")
    options.add_argument("--output", type=Path, metavar="FILE", help="write the moved script")
    options.add_argument("--html", metavar="FILE", help="write a page with all plans")
    options.add_argument("--trust-script", action="store_true", help="run the script without the kernel's confinement")
    return options


@dataclass(frozen=True)
class Moved(Report):
    """Ranked plans whose commands are the script's, with a plan's flags."""

    job: Job | None = None
    words: tuple[str, ...] = ()  # the script's flags, without those that a plan sets
    terms: Terms | None = None

    def name(self) -> str:
        return self.job.script.name

    def program(self, strategy: Strategy) -> list[str]:
        return [self.job.ours, *with_plan(list(self.words), training_flags(self.problem.workload, strategy))]


def move(args: argparse.Namespace, folder: Path, console: Console) -> int:
    """Plan the script's run at its new length, and print the moved script; returns the exit code.

    Raises:
        Refusal: the script's run is refused, or nothing fits.
        OSError: a file cannot be read or written.
    """
    job = job_of(args.script, args.arguments, args.trust_script, folder)
    if job is None:
        return EXIT_REFUSED
    words = acceptable(job, console)
    old = job.config(words)
    target = target_of(old, args)
    console.print(
        f"{args.script.name}: {job.program}, {job.launch.processes or 'an unknown number of'} processes, "
        f"{explain.count(old.data.seq_length)} tokens a sample -> {explain.count(target.length)} on "
        f"{target.gpus} x {target.machine.name}"
    )
    positions = positions_at(old, target.length, args.rope)
    given = options(at_length(words, positions.changes | batches(old, target), old))
    unknown = [option for option in given if option == ["--data-path"]]  # some program prints its value
    words = flat(option for option in given if option not in unknown)
    here = ["--mock-data"] if unknown else []
    here += ["--vocab-size", str(args.vocab_size)] if args.vocab_size else []

    report, results = planned(job, with_plan(words, here), target, args)
    describe(report, console)
    console.print(positions.words)
    if old.model.attention_dropout or old.model.hidden_dropout:
        console.print("The script's dropout is not in the plan; the dry run counts it.")
    done = None if args.no_dry_run else dry_run(report, args.gpu, console)
    lasts = describe_run(report, done, args.prices, console) if report.terms else ""

    plan, problem = report.plans[0], report.problem
    wanted = [*unknown, *options(with_plan(words, training_flags(problem.workload, plan.strategy)))]
    text, by_hand = rewritten(job, wanted, target)
    show_changes(job, text, [*by_hand, *(short_runs_folders(job) if positions.stretched else [])], console)
    if args.output:
        replace_file(args.output, text)
        args.output.chmod(args.script.stat().st_mode)
    if args.html:
        from megatron.simulator.planner.page import page

        theirs = [*words, "--data-path", "DATA"] if unknown else words
        report = replace(report, words=tuple(theirs))  # without what stands in for the tokenizer and the data here
        others = explain.alternatives(plan, problem, results.known)
        replace_file(args.html, page(report, results, others, lasts, done))
    return 0


def acceptable(job: Job, console: Console) -> list[str]:
    """The job's command line, or the one that the program accepts in its place, whose changes are printed.

    Raises:
        Refusal: it is refused, and the way out is a choice.
    """
    words = job.launch.flags
    try:
        job.config(words)
    except Refusal as refusal:
        result = accepted(refusal, words, job.config)
        if result is not None:
            for part in refusal.parts:
                console.print(f"- {part}")
            return result
        if missing := missing_files(job.script, job.done):
            raise Refusal(f"{job.script} {missing}") from refusal
        raise
    return words


def planned(job: Job, words: list[str], target: Target, args: argparse.Namespace) -> tuple[Moved, SearchResult]:
    """(Plans of the job, the one that its program accepts first, all that were priced).

    Raises:
        Refusal: the planner does not know the model, nothing fits, or the program accepts no plan.
    """
    config = job.config([*words, *([] if "--micro-batch-size" in words else ["--micro-batch-size", "1"])], 1)
    config.model.hidden_dropout = 0.0  # takes little memory and time, which the dry run counts
    refuse_unplannable(config)
    problem = problem_of(config, target)
    terms = terms_of(problem, config, args)
    results = search(problem, 3, near=1.25 if args.html else 1.0)
    report = Moved(Request(()), problem, results.plans, None, job, tuple(words), terms)
    refused = None if results.plans else nothing_fits(problem)
    for plan in results.plans:
        try:
            job.config(report.program(plan.strategy)[1:], problem.gpus)
        except Refusal as refusal:
            refused = refused or refusal
            continue
        plans = [plan, *(other for other in results.plans if other is not plan)]
        return replace(report, plans=plans, run=run_of(plan, problem, terms) if terms else None), results
    raise refused


def problem_of(config: Config, target: Target) -> Problem:
    """The planning problem of a run on one process."""
    from megatron.simulator.dry_run.one_rank import vocabulary_of

    try:
        vocabulary, _ = vocabulary_of(config)
    except Refusal as refusal:
        raise Refusal(str(refusal).replace("--dry-run: ", "")) from None
    workload, machine = workload_of(config, vocabulary), target.machine
    spare = share_of_memory(MARGIN, machine.memory, "--margin")
    limits = Limits(zero=(0, 1) if config.model.fp8_format else None)  # FP8 is priced as bf16
    return Problem(workload, target.gpus, machine, limits.of_shape(workload.shape), spare, machine.gpus)


def terms_of(problem: Problem, config: Config, args: argparse.Namespace) -> Terms | None:
    """Size and prices of the complete run; None if its number of tokens is not known."""
    run, data = config.run, config.data
    samples = (run.train_iters or 0) * data.global_batch_size or run.train_samples or 0
    count = big_number(args.train_tokens, "--train-tokens") if args.train_tokens else samples * data.seq_length
    if not count:
        return None
    prices = read_prices(args.prices)
    return Terms(count, prices if problem.machine.name in prices.gpu_hour else None)


def describe(report: Moved, console: Console) -> None:
    """Print the plan, why it wins, and the next one."""
    problem, plan = report.problem, report.plans[0]
    console.print(
        f"Plan: {explain.words(plan.strategy)}; global batch {problem.workload.global_batch}; "
        f"{duration(plan.seconds)} a step, MFU {100 * plan.estimate.mfu:.1f} %, {explain.gib(plan.memory.total)}"
    )
    console.print(f"Why: {explain.winning(plan, problem)}")
    for second in report.plans[1:2]:
        console.print(f"Next: {explain.words(second.strategy)}, {duration(second.seconds)} a step")


def dry_run(report: Moved, gpu: str, console: Console) -> Confirmation:
    """The plan's dry run, printed, with the allocator's setting of the moved script."""
    expandable = "expandable_segments:True" in with_allocator(report.job.script.read_text())
    setting = "expandable_segments" if expandable else "default"
    done = replace(confirm(report, report.plans[0], gpu), setting=setting)
    console.print(done.table())
    if warning := safer(done, report.problem):
        console.print(warning)
    return done


def describe_run(report: Moved, done: Confirmation | None, prices: Path, console: Console) -> str:
    """Print how long the complete run lasts and what it costs; returns these words."""
    run = run_of(report.plans[0], report.problem, report.terms, done.seconds if done else 0.0)
    lasts = run_words(run, report.terms)
    by = f", at the dry run's {duration(run.step)} a step" if done else ""
    unpriced = "" if report.terms.prices else f" {prices} has no price of this GPU: --prices FILE."
    console.print(f"The run{by}: {lasts}{unpriced}")
    return lasts


def show_changes(job: Job, text: str, by_hand: list[str], console: Console) -> None:
    """Print the moved script as a diff, and what is left to the user."""
    console.print()
    old, name = job.script.read_text(), str(job.script)
    for line in difflib.unified_diff(old.splitlines(), text.splitlines(), name, f"{name} (moved)", "", "", 2, ""):
        print(line)
    for line in [*by_hand, place(job, old)]:
        console.print(f"- {line}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
