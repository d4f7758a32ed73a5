# SPDX-License-Identifier: Apache-2.0
"""A launch script's training command, and the script's text with other flags, read again until it starts them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.training.arguments.argv import flat, options
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from tools.check_script import Launch, Record, parsed, report_nothing, training_commands
from tools.longer_run import Target
from tools.script_edits import Changes, edited, on_nodes, with_allocator

OWN_NODES = re.compile("node.?rank|rdzv|master|hostfile|srun|deepspeed")  # a launcher that knows its nodes
LENGTHS = re.compile("-(samples|iters|tokens)$")
NAME = re.compile("[A-Za-z_]{3}")


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

    @property
    def ours(self) -> str:
        """The program here that takes its place."""
        return "pretrain_llama.py" if "pretrain_llama" in self.program else "pretrain_gpt.py"

    def config(self, words: list[str], processes: int | None = None) -> Config:
        """The configuration of the program with other flags. Raises Refusal if it is refused."""
        return parsed(words, self.launch, self.cwd, self.done, processes)


def job_of(script: Path, arguments: list[str], trusted: bool, folder: Path) -> Job | None:
    """The script's first training command; None, with a report, if it starts none."""
    (folder / "before").mkdir()
    launches, done = training_commands(script, arguments, folder / "before", trusted)
    if not launches:
        report_nothing(script, done)
        return None
    return Job(script, arguments, trusted, folder, *launches[0], done)


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
        moved = with_allocator(on_nodes(text, job.launch.launcher, nodes, per_node))
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
        # a script may make names of its settings: a folder of results, a run's name
        named = {flag for flag in {*have} & {*new} if old.get(flag) == new[flag] and any(map(NAME.search, new[flag]))}
        wrong = {flag for flag in {*have, *new} - named if not _same(flag, have.get(flag), new.get(flag))}
        if not wrong:
            break
        literal |= wrong
        changes |= {flag: new.get(flag) for flag in wrong}
    if now is None:
        raise Refusal(f"{job.script}: with changed flags it starts no training; change it by hand: {flat(wanted)}")
    unchanged = [
        f"in the text, {flag} was not found as it is used: "
        + (f"set it to {' '.join(new[flag]) or 'on'}" if flag in new else "leave it out")
        for flag in sorted(wrong)
    ]
    return moved, [*unchanged, *starts(now, moved, target.gpus, nodes, per_node)]


def plain_values(given: list[list[str]]) -> dict[str, list[str]]:
    """The values of each flag; none for a flag that is switched on by `true`."""
    return {flag: [] if values == ["true"] else values for flag, *values in given}


def launched(job: Job, text: str, name: str) -> Launch | None:
    """The training command of the job's script with another text; None if it starts none."""
    folder = job.folder / name
    folder.mkdir()
    file = folder / job.script.name
    file.write_text(text)
    launches, _ = training_commands(file, job.arguments, folder, job.trusted)
    return launches[0][0] if launches else None


def _same(flag: str, have: list[str] | None, want: list[str] | None) -> bool:
    """Whether two flags have the same values; paths may depend on the folder in which the script lies.

    Lengths of the run may differ by a thousandth: the script's formulas round otherwise than we do.
    """
    if have is None or want is None or have == want:
        return have == want
    if LENGTHS.search(flag) and all(value.replace("_", "").isdigit() for value in [*have, *want]):
        return len(have) == len(want) and math.isclose(int(have[0]), int(want[0]), rel_tol=1e-3)
    return any("/" in value for value in have)


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


def place(job: Job, text: str) -> str:
    """Where the script must find this repository, in its own words."""
    found = re.search(rf"[^\s\"']*{re.escape(job.program)}", text)
    written = found[0] if found else job.launch.program
    other = f"; {job.program} is another program: start {job.ours}" if job.ours != job.program else ""
    if names := re.findall(r"\$\{?(\w+)", written):
        return f"set {names[0]} to a clone of megatron-longcontext: the script starts {written}{other}"
    if "/" in written:
        return f"in place of {written}, start {job.ours} in a clone of megatron-longcontext"
    entered = re.search(r"(?m)(?:^\s*|[;&'\"(]\s*)(?:cd|pushd)\s+([^\s;&'\"]+)", text)
    where = f"`cd {entered[1]}` must enter" if entered else "start the script in"
    return f"{where} a clone of megatron-longcontext, where {job.ours} is{other}"


def short_runs_folders(job: Job) -> list[str]:
    """What to do about the script's folders of checkpoints, which are the short run's."""
    folders = {flag: " ".join(values) for flag, *values in options(job.launch.flags) if flag in ("--save", "--load")}
    if not folders:
        return []
    old = folders.get("--load") or folders["--save"]
    return [
        f"{' '.join(f'{flag} {folder}' for flag, folder in folders.items())}: these are the short run's. Start with "
        f"--load {old} --finetune and a new --save; when that has a checkpoint, go on with it as --load, without "
        "--finetune"
    ]
