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
import re
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from megatron.simulator.changes_that_fit import SAME_CHOICE
from megatron.simulator.dry_run.replay import duration
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner import explain
from megatron.simulator.planner.confirm import confirm
from megatron.simulator.planner.limits import run_words
from megatron.simulator.planner.plan_report import Report, training_flags
from megatron.simulator.planner.plans import Plan, Problem
from megatron.simulator.planner.request import Request, big_number, refuse_unplannable, share_of_memory, tokens
from megatron.simulator.planner.run_cost import Terms, read_prices, run_of
from megatron.simulator.planner.search import search
from megatron.simulator.planner.search_space import Limits
from megatron.system.whole_file import replace_file
from megatron.training.arguments.argv import flat, options
from megatron.training.arguments.stages import workload_of
from megatron.training.arguments.suggest import accepted, fixed
from megatron.training.pretrain import CORE
from megatron.training.refusal import Fix, Refusal, reason
from megatron.training.settings.config import Config
from tools.check_script import Launch, Record, missing_files, parsed, report_nothing, training_commands
from tools.plan_options import MARGIN, on_nodes
from tools.script_edits import Changes, edited
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
ROPE = ("yarn", "base", "keep")


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
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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


def move(script: Path, args: argparse.Namespace, folder: Path, console: Console) -> int:
    """Plan the script's run at its new length, and print the moved script; returns the exit code.

    Raises:
        Refusal: the script's run is refused, or nothing fits.
        OSError: a file cannot be read or written.
    """
    (folder / "before").mkdir()
    launches, done = training_commands(script, args.arguments, folder / "before", args.trust_script)
    if not launches:
        report_nothing(script, done)
        return EXIT_REFUSED
    result, cwd = launches[0]

    def read(words: list[str], processes: int | None) -> Config:
        return parsed(words, result, cwd, done, processes)

    name = Path(result.program).name
    entry = "pretrain_llama.py" if "pretrain_llama" in name else "pretrain_gpt.py"
    try:
        words = acceptable(result.flags, lambda words: read(words, None), console)
    except Refusal as refusal:
        if not (missing := missing_files(done)):
            raise
        raise Refusal(f"{script} reads {missing}: copy it here, or set the variable of its folder") from refusal
    old = read(words, None)
    before, length = old.data.seq_length, tokens(args.seq_length, "--seq-length")
    if not before:
        raise Refusal(f"{script}: its command has no --seq-length")
    gpus, machine = on_nodes(args.gpus, load(args.gpu))
    batch = tokens(args.global_batch, "--global-batch") if args.global_batch else 0
    console.print(
        f"{script.name}: {name}, {result.processes or 'an unknown number of'} processes, "
        f"{explain.count(before)} tokens a sample -> {explain.count(length)} on {gpus} x {machine.name}"
    )

    at_length, positions = positions_at(old, before, length, args.rope)
    at_length |= batches(old, before, length, batch)
    dropped = [flag for flag, values in at_length.items() if values is None]
    plain = flat(fixed(options(words), Fix(drop=" ".join([*PLANNED, *dropped]))))
    plain = with_plan(plain, flat([flag, *values] for flag, values in at_length.items() if values is not None))
    if old.foreign.deepspeed_config:  # the file is left out, and may give this
        plain = with_plan(plain, ["--clip-grad", f"{old.optimizer.clip_grad:g}"])
    unknown = [option for option in options(plain) if option == ["--data-path"]]  # an unknown output
    here = ["--mock-data"] if unknown else []
    here += ["--vocab-size", str(args.vocab_size)] if args.vocab_size else []
    plain = flat(option for option in options(plain) if option not in unknown)
    config = acceptable_config(with_plan(plain, here), read)
    problem = problem_of(config, gpus, machine)

    results = search(problem, 3, near=1.25 if args.html else 1.0)
    planned = tuple(with_plan(plain, here))
    report = Moved(Request(()), problem, results.plans, script=script.name, entry=entry, words=planned)
    plan = first_accepted(report, lambda words: read(words, gpus))
    report = replace(report, plans=[plan, *(other for other in results.plans if other is not plan)])
    run, about = cost(plan, problem, config, args)
    report = replace(report, run=run)
    describe(report, positions, bool(old.model.attention_dropout or old.model.hidden_dropout), console)
    if not args.no_dry_run:
        console.print(confirm(report, plan, args.gpu).table())
    if run:
        console.print(f"The run: {run_words(run, about)}{source_of(about, args.prices)}")

    wanted = [*unknown, *options(with_plan(plain, training_flags(problem.workload, plan.strategy)))]
    text, by_hand = rewritten(script, result, done, wanted, gpus, machine.gpus, args, folder)
    console.print()
    old_text = script.read_text()
    for line in difflib.unified_diff(
        old_text.splitlines(), text.splitlines(), str(script), f"{script} (moved)", "", "", 2, ""
    ):
        print(line)
    for line in [*by_hand, *places(result, cwd, old_text)]:
        console.print(f"- {line}", soft_wrap=True)
    if args.output:
        replace_file(args.output, text)
        args.output.chmod(script.stat().st_mode)
    if args.html:
        from megatron.simulator.planner.page import page

        others = explain.alternatives(plan, problem, results.known)
        replace_file(args.html, page(report, results, others, run_words(run, about) if run else ""))
    return 0


def acceptable(words: list[str], read, console: Console) -> list[str]:
    """The command line, or the one that the program accepts in its place, whose changes are printed.

    Raises:
        Refusal: it is refused, and the way out is a choice.
    """
    try:
        read(words)
    except Refusal as refusal:
        result = accepted(refusal, words, read)
        if result is None:
            raise
        for part in refusal.parts:
            console.print(f"- {part}")
        return result
    return words


def acceptable_config(words: list[str], read) -> Config:
    """The configuration on one process; its model is one that the planner knows.

    Raises:
        Refusal: it does not know it.
    """
    config = read([*words, *([] if "--micro-batch-size" in words else ["--micro-batch-size", "1"])], 1)
    config.model.hidden_dropout = 0.0  # takes little memory and time, which the dry run counts
    refuse_unplannable(config)
    return config


def problem_of(config: Config, gpus: int, machine) -> Problem:
    """The planning problem of a run on one process."""
    from megatron.simulator.dry_run.one_rank import vocabulary_of

    try:
        vocabulary, _ = vocabulary_of(config)
    except Refusal as refusal:
        raise Refusal(str(refusal).replace("--dry-run: ", "")) from None
    workload = workload_of(config, vocabulary)
    spare = share_of_memory(MARGIN, machine.memory, "--margin")
    limits = Limits(zero=(0, 1) if config.model.fp8_format else None)  # FP8 is priced as bf16
    return Problem(workload, gpus, machine, limits.of_shape(workload.shape), spare, machine.gpus)


def with_plan(words: list[str], flags: list[str]) -> list[str]:
    """The command line with these flags in place of its own."""
    new = options(flags)
    kept = [option for option in options(words) if option[0] not in {flag for flag, *_ in new}]
    return flat([*kept, *new])


def first_accepted(report: Moved, read) -> Plan:
    """The fastest plan that the program accepts.

    Raises:
        Refusal: nothing fits, or the program accepts no plan.
    """
    from tools.plan import nothing_fits

    refused = nothing_fits(report.problem) if not report.plans else None
    for plan in report.plans:
        try:
            read(report.program(plan.strategy)[1:])
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
    resume = "Start from the checkpoint of the short run with --load DIR --finetune and a new --save."
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
    return changes, (
        f"Rotary positions: YaRN, factor {factor:g} from {explain.count(before)} tokens; --rope base gives "
        f"--rotary-base {base} in its place; from scratch, --rope keep. {resume}"
    )


def batches(config: Config, before: int, length: int, batch: int) -> Changes:
    """Flags for as many tokens in a step and in the run as before."""
    old = config.data.global_batch_size or 1
    batch = batch or max(1, old * before // length)
    changes: Changes = {"--global-batch-size": [str(batch)]}
    per_step, per_sample = old * before / (batch * length), before / length
    for section, unit, share in (("iters", "iters", per_step), ("samples", "samples", per_sample)):
        for name in ("train", "lr_decay", "lr_warmup", "lr_wsd_decay"):
            value = getattr(config.part_with(f"{name}_{section}"), f"{name}_{section}")
            if value and share != 1:
                changes[f"--{name.replace('_', '-')}-{unit}"] = [str(max(1, round(value * share)))]
    return changes


def cost(plan: Plan, problem: Problem, config: Config, args: argparse.Namespace):
    """(The complete run with a plan, its terms); (None, None) if its number of tokens is not known."""
    a_step = config.data.seq_length * config.data.global_batch_size
    run = config.run
    count = (run.train_iters or 0) * a_step or (run.train_samples or 0) * config.data.seq_length
    count = big_number(args.train_tokens, "--train-tokens") if args.train_tokens else count
    if not count:
        return None, None
    prices = read_prices(args.prices)
    about = Terms(count, prices if problem.machine.name in prices.gpu_hour else None)
    return run_of(plan, problem, about), about


def source_of(about: Terms, file: Path) -> str:
    return "" if about.prices else f" {file} has no price of this GPU: --prices FILE."


def describe(report: Moved, positions: str, dropout: bool, console: Console) -> None:
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


def rewritten(
    script: Path, result: Launch, done: Record, wanted: list[list[str]], gpus: int, per_node: int,
    args: argparse.Namespace, folder: Path,
) -> tuple[str, list[str]]:  # fmt: skip
    """(The script's text with the wanted flags, what its text does not show and is left to the user)."""
    text, given = script.read_text(), options(result.flags)
    nodes, per_node = max(1, gpus // per_node), min(gpus, per_node)
    last = {flag: [] if values == ["true"] else values for flag, *values in given}
    new = {flag: values for flag, *values in wanted}
    changes: Changes = {flag: None for flag in last if flag not in new}
    changes |= {flag: values for flag, values in new.items() if last.get(flag) != values}
    literal, wrong = set(), set()
    for attempt in range(3):
        counts = {flag: len(values) for flag, *values in given}
        moved = edited(with_nodes(text, result.launcher, nodes, per_node), changes, counts, literal)
        after = folder / f"after{attempt}"
        after.mkdir()
        file = folder / script.name
        file.write_text(moved)
        launches, _ = training_commands(file, args.arguments, after, args.trust_script)
        if not launches:
            literal = set(changes)
            continue
        now, _ = launches[0]
        have = {flag: [] if values == ["true"] else values for flag, *values in options(now.flags)}
        share = gpus // now.processes if now.processes and gpus % now.processes == 0 else 1
        if attempt == 0 and share > 1 and "#SBATCH" in text and now.processes % nodes == 0:
            nodes, per_node = nodes * share, per_node // share  # the script's nodes have fewer GPUs
            continue
        wrong = {flag for flag in {*have, *new} if not _same(have.get(flag), new.get(flag), script, file)}
        if not wrong:
            break
        literal |= wrong
        changes |= {flag: new.get(flag) for flag in wrong}
    if not launches:
        raise Refusal(f"{script}: with changed flags it starts no training; change it by hand: {flat(wanted)}")
    by_hand = [
        f"in the text, {flag} was not found as it is used: set it to {' '.join(new[flag]) or 'on'}"
        if flag in new
        else f"in the text, {flag} was not found as it is used: leave it out"
        for flag in sorted(wrong)
    ]
    if now.processes and now.processes != gpus:
        by_hand.append(f"the script starts {now.processes} processes: start it on {nodes} nodes of {per_node} GPUs")
    elif nodes > 1 and not any(OWN_NODES.search(word) for word in now.launcher):
        by_hand.append(f"on {nodes} nodes, torchrun needs --node-rank and --master-addr too")
    header = re.search(r"(?m)^#SBATCH.*(?:gres=gpu\S*:|gpus-per-node=)(\d+)", moved)
    if header and int(header[1]) != per_node:
        by_hand.append(f"`{header[0]}`: the plan has {per_node} GPUs in a node")
    if not now.processes:
        by_hand.append(f"start it with {gpus} processes: {nodes} nodes of {per_node} GPUs")
    return moved, by_hand


def _same(have: list[str] | None, want: list[str] | None, script: Path, moved: Path) -> bool:
    """Whether two flags have the same values; paths depend on the script's own folder and the folder of its record."""
    if have is None or want is None:
        return have is want

    def plain(value: str) -> str:
        return re.sub(r"^.*(/tmp[^/]*/|/before/|/after\d/)", "", value.replace(str(script.resolve().parent), ""))

    return (
        have == want
        or [plain(value) for value in have] == [plain(value) for value in want]
        or any("/" in value for value in have)
    )


def places(result: Launch, cwd: Path, text: str) -> list[str]:
    """Where the script must find this repository, in its own words."""
    found = re.search(rf"[^\s\"']*{re.escape(Path(result.program).name)}", text)
    written = found[0] if found else result.program
    lines = []
    if names := re.findall(r"\$\{?(\w+)", written):
        lines.append(f"set {names[0]} to a clone of megatron-longcontext: the script starts {written}")
    elif "/" in written:
        lines.append(f"in place of {written}, start the program of the same name in a clone of megatron-longcontext")
    else:
        entered = re.search(r"(?m)^\s*(?:cd|pushd)\s+(\S+)", text)
        where = f"`cd {entered[1]}` must enter" if entered else "start the script in"
        lines.append(f"{where} a clone of megatron-longcontext, where {written} is")
    if Path(result.program).name not in ("pretrain_gpt.py", "pretrain_llama.py"):
        lines.append(f"{Path(result.program).name} is another program: start pretrain_gpt.py")
    return lines


if __name__ == "__main__":
    sys.exit(main())
