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
import math
import re
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatron.simulator.changes_that_fit import SAME_CHOICE
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner import explain
from megatron.simulator.planner.confirm import confirm, safer
from megatron.simulator.planner.limits import run_words
from megatron.simulator.planner.plan_report import Report, training_flags
from megatron.simulator.planner.plans import Plan, Problem
from megatron.simulator.planner.request import Request, big_number, refuse_unplannable, share_of_memory, tokens
from megatron.simulator.planner.run_cost import Terms, read_prices, run_of
from megatron.simulator.planner.search import SearchResult, search
from megatron.simulator.planner.search_space import Limits
from megatron.system.whole_file import replace_file
from megatron.training.arguments.argv import flat, options
from megatron.training.arguments.stages import workload_of
from megatron.training.arguments.suggest import accepted, fixed
from megatron.training.pretrain import CORE
from megatron.training.refusal import Fix, Refusal, reason
from megatron.training.settings.config import Config
from tools.check_script import Launch, Record, missing_files, parsed, report_nothing, training_commands
from tools.option_parser import OptionParser
from tools.plan_options import MARGIN, on_nodes
from tools.script_edits import Changes, edited, with_allocator
from tools.script_edits import on_nodes as with_nodes

PRICES = Path(__file__).parents[1] / "examples" / "planner" / "prices.json"
EXIT_REFUSED = 2
# Flags of a script that the plan replaces, in addition to `SAME_CHOICE`.
PLANNED = """--tensor-model-parallel-size --sequence-parallel --pipeline-model-parallel-size --micro-batch-size
--expert-model-parallel-size --overlap-grad-reduce --overlap-param-gather --fpdt --fpdt-chunk-size --no-fpdt-offload
--fpdt-stream-hidden --offload-checkpoints --ffn-chunks --loss-chunks --account-for-embedding-in-pipeline-split
--account-for-loss-in-pipeline-split --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
--pipeline-model-parallel-layout --use-torch-fsdp2 --rampup-batch-size --tp-comm-overlap --fp16 --deepspeed
--step-batch-size-schedule --deepspeed_config --deepspeed-config --deepspeed-activation-checkpointing""".split()
PLANNED += " ".join(SAME_CHOICE).split()
OWN_NODES = re.compile("node.?rank|rdzv|master|hostfile|srun|deepspeed")  # a launcher that knows its nodes
RESUME = "Start from the checkpoint of the short run"
ROPE = ("yarn", "base", "keep")
LENGTHS = re.compile("-(samples|iters|tokens)$")
PROGRAMS = ("pretrain_gpt.py", "pretrain_llama.py")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    own = words.index("--") if "--" in words else len(words)
    args = parser().parse_args(words[:own])
    args.arguments = words[own + 1 :]
    warnings.filterwarnings("ignore", module=CORE)
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False, markup=False)
    script = Path(args.script)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return move(script, args, Path(folder), console)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or script}: {reason(error)}", file=sys.stderr)
    return EXIT_REFUSED


def parser() -> argparse.ArgumentParser:
    options = OptionParser(__doc__, allow_abbrev=False)
    options.add_argument("script", metavar="SCRIPT", help="the launch script; its own arguments follow after --")
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

    script: str = ""
    entry: str = ""
    words: tuple[str, ...] = ()  # the script's flags, without those that a plan sets

    def name(self) -> str:
        return self.script

    def program(self, strategy) -> list[str]:
        return [self.entry, *with_plan(list(self.words), training_flags(self.problem.workload, strategy))]


@dataclass(frozen=True)
class Job:
    """A script's first training command, and what is needed to read it again."""

    script: Path
    arguments: list[str]
    trusted: bool
    folder: Path  # for what the script writes
    launch: Launch
    cwd: Path
    done: Record

    @property
    def program(self) -> str:
        return Path(self.launch.program).name


@dataclass(frozen=True)
class Target:
    """Where a run goes: from ``before`` tokens in a sample to ``length``, on ``gpus``."""

    before: int
    length: int
    batch: int
    gpus: int
    machine: Machine


def move(script: Path, args: argparse.Namespace, folder: Path, console: Console) -> int:
    """Plan the script's run at its new length, and print the moved script; returns the exit code.

    Raises:
        Refusal: the script's run is refused, or nothing fits.
        OSError: a file cannot be read or written.
    """
    job = job_of(script, args.arguments, args.trust_script, folder)
    if job is None:
        return EXIT_REFUSED
    words = acceptable(job, console)
    old = config_of(job, words)
    target = target_of(old, args)
    console.print(
        f"{script.name}: {job.program}, {job.launch.processes or 'an unknown number of'} processes, "
        f"{explain.count(target.before)} tokens a sample -> {explain.count(target.length)} on "
        f"{target.gpus} x {target.machine.name}"
    )
    changes, positions = positions_at(old, target.before, target.length, args.rope)
    words = at_length(words, changes | batches(old, target), old)
    words, unknown = without_unknown_data(words)
    here = ["--mock-data"] if unknown else []
    here += ["--vocab-size", str(args.vocab_size)] if args.vocab_size else []

    config = acceptable_config(job, with_plan(words, here))
    report, results = planned(job, with_plan(words, here), problem_of(config, target), 1.25 if args.html else 1.0)
    plan, problem = report.plans[0], report.problem
    about = terms_of(problem, config, args)
    report = replace(report, run=run_of(plan, problem, about) if about else None)
    describe(report, positions, bool(old.model.attention_dropout or old.model.hidden_dropout), console)
    done = None if args.no_dry_run else replace(confirm(report, plan, args.gpu), setting=allocator_of(script))
    if done:
        console.print(done.table())
        if warning := safer(done, problem):
            console.print(warning)
    lasts = ""
    if about:
        run = run_of(plan, problem, about, done.seconds if done else 0.0)
        lasts = run_words(run, about)
        by = f", at the dry run's {duration(run.step)} a step" if done else ""
        console.print(f"The run{by}: {lasts}{source_of(about, args.prices)}")

    wanted = [*unknown, *options(with_plan(words, training_flags(problem.workload, plan.strategy)))]
    text, by_hand = rewritten(job, wanted, target)
    show_changes(job, text, [*by_hand, *checkpoints(options(job.launch.flags), positions)], console)
    if args.output:
        replace_file(args.output, text)
        args.output.chmod(script.stat().st_mode)
    if args.html:
        from megatron.simulator.planner.page import page

        theirs = [*words, "--data-path", "DATA"] if unknown else words
        report = replace(report, words=tuple(theirs))  # without what stands in for the tokenizer and the data here
        others = explain.alternatives(plan, problem, results.known)
        replace_file(args.html, page(report, results, others, lasts, done))
    return 0


def job_of(script: Path, arguments: list[str], trusted: bool, folder: Path) -> Job | None:
    """The script's first training command; None, with a report, if it starts none."""
    (folder / "before").mkdir()
    launches, done = training_commands(script, arguments, folder / "before", trusted)
    if not launches:
        report_nothing(script, done)
        return None
    return Job(script, arguments, trusted, folder, *launches[0], done)


def config_of(job: Job, words: list[str], processes: int | None = None) -> Config:
    """The configuration of the job's program with other flags. Raises Refusal if it is refused."""
    return parsed(words, job.launch, job.cwd, job.done, processes)


def acceptable(job: Job, console: Console) -> list[str]:
    """The job's command line, or the one that the program accepts in its place, whose changes are printed.

    Raises:
        Refusal: it is refused, and the way out is a choice.
    """
    words = job.launch.flags
    try:
        config_of(job, words)
    except Refusal as refusal:
        result = accepted(refusal, words, lambda words: config_of(job, words))
        if result is not None:
            for part in refusal.parts:
                console.print(f"- {part}")
            return result
        if missing := missing_files(job.script, job.done):
            raise Refusal(f"{job.script} {missing}") from refusal
        raise
    return words


def target_of(config: Config, args: argparse.Namespace) -> Target:
    """Where the options send a run. Raises Refusal."""
    before, length = config.data.seq_length, tokens(args.seq_length, "--seq-length")
    if not before:
        raise Refusal(f"{args.script}: its command has no --seq-length")
    gpus, machine = on_nodes(args.gpus, load(args.gpu))
    batch = tokens(args.global_batch, "--global-batch") if args.global_batch else 0
    batch = batch or max(1, (config.data.global_batch_size or 1) * before // length)
    return Target(before, length, batch, gpus, machine)


def at_length(words: list[str], changes: Changes, config: Config) -> list[str]:
    """The command line with the changes for a length, and without what a plan decides."""
    dropped = [flag for flag, values in changes.items() if values is None]
    plain = flat(fixed(options(words), Fix(drop=" ".join([*PLANNED, *dropped]))))
    plain = with_plan(plain, flat([flag, *values] for flag, values in changes.items() if values is not None))
    if config.foreign.deepspeed_config:  # the file is left out, and may give this
        plain = with_plan(plain, ["--clip-grad", f"{config.optimizer.clip_grad:g}"])
    return plain


def without_unknown_data(words: list[str]) -> tuple[list[str], list[list[str]]]:
    """(The command line without a --data-path whose value some program prints, that option)."""
    unknown = [option for option in options(words) if option == ["--data-path"]]
    return flat(option for option in options(words) if option not in unknown), unknown


def planned(job: Job, words: list[str], problem: Problem, near: float) -> tuple[Moved, SearchResult]:
    """(Plans of the job, the one that its program accepts first, all that were priced).

    Raises:
        Refusal: nothing fits, or the program accepts no plan.
    """
    results = search(problem, 3, near=near)
    entry = "pretrain_llama.py" if "pretrain_llama" in job.program else "pretrain_gpt.py"
    report = Moved(Request(()), problem, results.plans, script=job.script.name, entry=entry, words=tuple(words))
    plan = first_accepted(report, job)
    return replace(report, plans=[plan, *(other for other in results.plans if other is not plan)]), results


def acceptable_config(job: Job, words: list[str]) -> Config:
    """The configuration on one process; its model is one that the planner knows.

    Raises:
        Refusal: it does not know it.
    """
    config = config_of(job, [*words, *([] if "--micro-batch-size" in words else ["--micro-batch-size", "1"])], 1)
    config.model.hidden_dropout = 0.0  # takes little memory and time, which the dry run counts
    refuse_unplannable(config)
    return config


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


def with_plan(words: list[str], flags: list[str]) -> list[str]:
    """The command line with these flags in place of its own."""
    new = options(flags)
    kept = [option for option in options(words) if option[0] not in {flag for flag, *_ in new}]
    return flat([*kept, *new])


def first_accepted(report: Moved, job: Job) -> Plan:
    """The fastest plan that the program accepts.

    Raises:
        Refusal: nothing fits, or the program accepts no plan.
    """
    from tools.plan import nothing_fits

    refused = nothing_fits(report.problem) if not report.plans else None
    for plan in report.plans:
        try:
            config_of(job, report.program(plan.strategy)[1:], report.problem.gpus)
            return plan
        except Refusal as refusal:
            refused = refused or refusal
    raise refused


def positions_at(config: Config, before: int, length: int, rope: str) -> tuple[Changes, str]:
    """(Flags with which positions reach a length, what to know about them)."""
    model, changes = config.model, {"--seq-length": [str(length)]}
    kind, factor = model.position_embedding_type, length / before
    trained = before
    if model.max_position_embeddings:
        changes["--max-position-embeddings"] = [str(max(length, model.max_position_embeddings))]
        if model.use_rope_scaling:  # Llama 3.1's factor of 8 reaches 128K tokens
            trained = max(before, int(16384 * model.rope_scaling_factor))
    if kind == "learned_absolute":
        return changes, f"Positions are learned: those beyond {before:,} are new rows, so train from scratch."
    if kind not in ("rope", "yarn"):
        return changes, f"Positions ({kind}) need no change."
    if length <= trained or rope == "keep":
        why = "--rope keep" if rope == "keep" else f"they reach {explain.count(trained)} tokens"
        return changes, f"Rotary positions stay as they are ({why})."
    resume = f"{RESUME} with --load DIR --finetune and a new --save."
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    base = round(model.rotary_base * factor ** (head / (head - 2)))
    if kind == "yarn":
        more = model.yarn_rotary_scaling_factor * factor
        changes["--yarn-rotary-scaling-factor"] = [f"{more:g}"]
        return changes, f"YaRN's factor grows to {more:g}. {resume}"
    if model.use_rope_scaling:
        more = model.rope_scaling_factor * length / trained
        changes["--rope-scaling-factor"] = [f"{more:g}"]
        return changes, f"Llama 3.1's scaling of positions grows to a factor of {more:g}. {resume}"
    if rope == "base":
        changes["--rotary-base"] = [str(base)]
        return changes, f"RoPE's base grows from {model.rotary_base:,} to {base:,} (NTK-aware scaling). {resume}"
    changes |= {
        "--position-embedding-type": ["yarn"],
        "--use-rotary-position-embeddings": None,
        "--yarn-rotary-scaling-factor": [f"{factor:g}"],
        "--yarn-original-max-position-embeddings": [str(before)],
    }
    longer = model.max_position_embeddings or 0
    reaches = f", or if the checkpoint knows {longer:,} positions, as the script says" if longer >= length else ""
    return changes, (
        f"Rotary positions: YaRN, factor {factor:g} from {explain.count(before)} tokens; --rope base gives "
        f"--rotary-base {base} in its place; from scratch{reaches}: --rope keep. {resume}"
    )


def batches(config: Config, target: Target) -> Changes:
    """Flags for as many tokens in a step and in the run as before."""
    changes: Changes = {"--global-batch-size": [str(target.batch)]}
    per_sample = target.before / target.length
    per_step = (config.data.global_batch_size or 1) / target.batch * per_sample
    for section, unit, share in (("iters", "iters", per_step), ("samples", "samples", per_sample)):
        for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay"):
            value = getattr(config.part_with(f"{name}_{section}"), f"{name}_{section}")
            if value and share != 1:
                changes[f"--{name.replace('_', '-')}-{unit}"] = [str(max(1, round(value * share)))]
    return changes


def terms_of(problem: Problem, config: Config, args: argparse.Namespace) -> Terms | None:
    """Size and prices of the complete run; None if its number of tokens is not known."""
    a_step = config.data.seq_length * config.data.global_batch_size
    run = config.run
    count = (run.train_iters or 0) * a_step or (run.train_samples or 0) * config.data.seq_length
    count = big_number(args.train_tokens, "--train-tokens") if args.train_tokens else count
    if not count:
        return None
    prices = read_prices(args.prices)
    return Terms(count, prices if problem.machine.name in prices.gpu_hour else None)


def allocator_of(script: Path) -> str:
    """The allocator's setting of the moved script."""
    return "expandable_segments" if "expandable_segments:True" in with_allocator(script.read_text()) else "default"


def source_of(about: Terms, file: Path) -> str:
    """Words about a GPU without a price."""
    return "" if about.prices else f" {file} has no price of this GPU: --prices FILE."


def describe(report: Moved, positions: str, dropout: bool, console: Console) -> None:
    """Print the plan, why it wins, and what happens to positions and dropout."""
    problem, plan = report.problem, report.plans[0]
    console.print(
        f"Plan: {explain.words(plan.strategy)}; global batch {problem.workload.global_batch}; "
        f"{duration(plan.seconds)} a step, MFU {100 * plan.estimate.mfu:.1f} %, {explain.gib(plan.memory.total)}"
    )
    console.print(f"Why: {explain.winning(plan, problem)}")
    if len(report.plans) > 1:
        second = report.plans[1]
        console.print(f"Next: {explain.words(second.strategy)}, {duration(second.seconds)} a step")
    console.print(positions)
    if dropout:
        console.print("The script's dropout is not in the plan; the dry run counts it.")


def rewritten(job: Job, wanted: list[list[str]], target: Target) -> tuple[str, list[str]]:
    """(The script's text with the wanted flags, what its text does not show and is left to the user).

    What the script computes is changed only if its result is not the wanted value: the first text leaves it, and each
    further one writes the values that were wrong in place of their variables.
    """
    text, given = job.script.read_text(), options(job.launch.flags)
    per_node = min(target.gpus, target.machine.gpus)
    nodes = target.gpus // per_node
    old = plain_values(given)
    new = {flag: values for flag, *values in wanted}
    changes: Changes = {flag: None for flag in old if flag not in new}
    changes |= {flag: values for flag, values in new.items() if old.get(flag) != values}
    counts = {flag: len(values) for flag, *values in given}
    literal: set[str] = set()
    for attempt in range(4):
        moved = with_allocator(with_nodes(text, job.launch.launcher, nodes, per_node))
        moved = edited(moved, changes, counts, literal)
        now = launched(job, moved, f"after{attempt}")
        if now is None:
            literal = set(changes)
            continue
        share = target.gpus // now.processes if now.processes and target.gpus % now.processes == 0 else 1
        if attempt == 0 and share > 1 and "#SBATCH" in text and now.processes % nodes == 0:
            nodes, per_node = nodes * share, per_node // share  # the script's nodes have fewer GPUs
            continue
        have = plain_values(options(now.flags))
        folders = (job.script.resolve().parent, job.folder)
        named = {flag for flag in {*have} & {*new} if old.get(flag) == new[flag] and made_of_words(new[flag])}
        wrong = {flag for flag in {*have, *new} - named if not _same(flag, have.get(flag), new.get(flag), folders)}
        if not wrong:
            break
        literal |= wrong
        changes |= {flag: new.get(flag) for flag in wrong}
    if now is None:
        raise Refusal(f"{job.script}: with changed flags it starts no training; change it by hand: {flat(wanted)}")
    return moved, [*not_found(wrong, new), *starts(now, moved, target.gpus, nodes, per_node)]


def plain_values(given: list[list[str]]) -> dict[str, list[str]]:
    """The values of each flag; none for a flag that is switched on by `true`."""
    return {flag: [] if values == ["true"] else values for flag, *values in given}


def made_of_words(values: list[str]) -> bool:
    """Whether values are names, which a script may make of its settings: a folder of results, a run's name."""
    return any(re.search("[A-Za-z_]{3}", value) for value in values)


def launched(job: Job, text: str, name: str) -> Launch | None:
    """The training command of the job's script with another text; None if it starts none."""
    folder = job.folder / name
    folder.mkdir()
    file = folder / job.script.name
    file.write_text(text)
    launches, _ = training_commands(file, job.arguments, folder, job.trusted)
    return launches[0][0] if launches else None


def checkpoints(given: list[list[str]], positions: str) -> list[str]:
    """What to do about the script's folders of checkpoints, which are the short run's, if positions change."""
    folders = {flag: " ".join(values) for flag, *values in given if flag in ("--save", "--load")}
    if not folders or RESUME not in positions:
        return []
    old = folders.get("--load") or folders["--save"]
    return [
        f"{' '.join(f'{flag} {folder}' for flag, folder in folders.items())}: these are the short run's. Start with "
        f"--load {old} --finetune and a new --save; when that has a checkpoint, go on with it as --load, without "
        "--finetune"
    ]


def not_found(wrong: set[str], new: dict[str, list[str]]) -> list[str]:
    """What to do about flags that the text's changes did not reach."""
    return [
        f"in the text, {flag} was not found as it is used: "
        + (f"set it to {' '.join(new[flag]) or 'on'}" if flag in new else "leave it out")
        for flag in sorted(wrong)
    ]


def starts(now: Launch, text: str, gpus: int, nodes: int, per_node: int) -> list[str]:
    """What to do so that the moved script starts a process for each GPU."""
    lines = []
    if now.processes and now.processes != gpus:
        lines.append(f"the script starts {now.processes} processes: start it on {nodes} nodes of {per_node} GPUs")
    elif nodes > 1 and not any(OWN_NODES.search(word) for word in now.launcher):
        lines.append(f"on {nodes} nodes, torchrun needs --node-rank and --master-addr too")
    header = re.search(r"(?m)^#SBATCH.*(?:gres=gpu\S*:|gpus-per-node=)(\d+)", text)
    if header and int(header[1]) != per_node:
        lines.append(f"`{header[0]}`: the plan has {per_node} GPUs in a node")
    if not now.processes:
        lines.append(f"start it with {gpus} processes: {nodes} nodes of {per_node} GPUs")
    return lines


def show_changes(job: Job, text: str, by_hand: list[str], console: Console) -> None:
    """Print the moved script as a diff, and what is left to the user."""
    console.print()
    old, name = job.script.read_text(), str(job.script)
    for line in difflib.unified_diff(old.splitlines(), text.splitlines(), name, f"{name} (moved)", "", "", 2, ""):
        print(line)
    for line in [*by_hand, *places(job, old)]:
        console.print(f"- {line}", soft_wrap=True)


def _same(flag: str, have: list[str] | None, want: list[str] | None, folders: tuple[Path, Path]) -> bool:
    """Whether two flags have the same values; paths depend on the script's folder and the folder of its record.

    Lengths of the run may differ by a thousandth: the script's formulas round otherwise than we do.
    """
    if have is None or want is None:
        return have is want

    def plain(value: str) -> str:
        return re.sub(r"^.*(/tmp[^/]*/|/before/|/after\d/)", "", value.replace(str(folders[0]), ""))

    if have != want and LENGTHS.search(flag) and all(value.replace("_", "").isdigit() for value in [*have, *want]):
        return len(have) == len(want) and math.isclose(int(have[0]), int(want[0]), rel_tol=1e-3)
    return (
        have == want
        or [plain(value) for value in have] == [plain(value) for value in want]
        or any("/" in value for value in have)
    )


def places(job: Job, text: str) -> list[str]:
    """Where the script must find this repository, in its own words."""
    program = job.launch.program
    found = re.search(rf"[^\s\"']*{re.escape(job.program)}", text)
    written = found[0] if found else program
    ours = job.program if job.program in PROGRAMS else "pretrain_gpt.py"
    other = f"; {job.program} is another program: start {ours}" if ours != job.program else ""
    if names := re.findall(r"\$\{?(\w+)", written):
        return [f"set {names[0]} to a clone of megatron-longcontext: the script starts {written}{other}"]
    if "/" in written:
        return [f"in place of {written}, start {ours} in a clone of megatron-longcontext"]
    entered = re.search(r"(?m)(?:^\s*|[;&'\"(]\s*)(?:cd|pushd)\s+([^\s;&'\"]+)", text)
    where = f"`cd {entered[1]}` must enter" if entered else "start the script in"
    return [f"{where} a clone of megatron-longcontext, where {ours} is{other}"]


if __name__ == "__main__":
    sys.exit(main())
