#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Report whether this program accepts the training commands of a launch script, without starting anything.

    python tools/check_script.py train_llama.sh
    python tools/check_script.py --processes 64 train_llama.sh 8B /data   # 8B and /data are the script's arguments

The script runs in bash with stand-ins for every program: calls of torchrun, deepspeed, srun, python and all others are
recorded, not started. What the script writes goes to a folder that is deleted; jobs that it submits by sbatch are
followed. The kernel (Landlock, seccomp) confines the script, which can only read files. Its training commands are then
parsed as pretrain_gpt.py parses them. Exit code 0: all are accepted; 2: one is refused; 1: the script starts none.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
import re
import shlex
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

from megatron.training.arguments import validate
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal, Refusals, Unreadable, refusing, some
from megatron.training.settings.config import Config
from megatron.training.settings.models import LLAMA_DEFAULTS
from tools.launch_command import Launch, grid, launch, slurm
from tools.launch_confined import why_not
from tools.launch_script import SECONDS, Record, record
from tools.option_parser import OptionParser, in_one_line

EXIT_NOTHING, EXIT_REFUSED = 1, 2
MISSING = re.compile(  # of bash, cat, sed and others
    r"^(?:.*: )?(?:can't read |cannot \w+ )?'?([^:'\n]+?)'?(?: for reading)?: No such file or directory$", re.MULTILINE
)
PLACEHOLDER = re.compile(r"<[A-Za-z][\w ,/-]*>")
SILENT = ("cd", "mkdir", "tee", "source", "export", "bash", "sh", "sbatch")  # calls that are not reported


@in_one_line(Refusal)
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    script = Path(args.script)
    if not script.is_file():
        raise Refusal(f"{script} is not a file")
    with refusing(script, OSError):
        return check(script, args)


def check(script: Path, args: argparse.Namespace) -> int:
    """Run the script with stand-ins and report each training command; returns the exit code.

    Raises:
        Refusal: the script cannot be confined on this machine, or it changed the record of its calls.
        OSError: it cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        launches, done = training_commands(script, args.arguments, Path(folder), trusted=args.trust_script)
        for training, cwd in launches:
            accepted = report(training, cwd, done, args.processes)
            args.refused = args.refused or not accepted
        report_others(done)
        if launches and args.refused and (missing := missing_files(script, done)):
            print(f"the script {missing}")
    if not launches:
        report_nothing(script, done)
        return EXIT_NOTHING
    return EXIT_REFUSED if args.refused else 0


def training_commands(
    script: Path, arguments: list[str], folder: Path, trusted: bool
) -> tuple[list[tuple[Launch, Path]], Record]:
    """(The training commands of a script with their working directories, all that it called).

    Args:
        folder: an empty one, for what the script writes.
        trusted: whether to run the script without the kernel's confinement.

    Raises:
        Refusal, OSError: see :func:`check`.
    """
    if not trusted and (why := why_not()):
        raise Refusal(
            f"{why}, and a script may do more than start a program: read {script}, and if you would run it yourself, "
            "give --trust-script"
        )
    environment = {**slurm(script.read_text(errors="replace")), **os.environ}
    done = record(script.resolve(), arguments, Path.cwd(), environment, folder, confined=not trusted)
    launches = []
    for call in done.calls:
        if (training := launch(call.words, call.tasks)) and (training, call.cwd) not in launches:
            launches.append((training, call.cwd))
    return launches, done


def parsed(flags: list[str], result: Launch, cwd: Path, done: Record, processes: int | None) -> Config:
    """The configuration of a training command with these ``flags``. Raises Refusal if it is refused."""
    name = Path(result.program).name
    before = Path.cwd()
    os.chdir(cwd)
    try:
        # The script runs on other machines, which are assumed to have Transformer Engine.
        with patch.object(validate, "transformer_engine_installed", lambda: True):
            flags = [recorded_path(word, cwd, done) for word in flags]
            return parse(flags, LLAMA_DEFAULTS if "pretrain_llama" in name else None, processes, shape_of)
    finally:
        os.chdir(before)


def parser() -> argparse.ArgumentParser:
    options = OptionParser(__doc__, allow_abbrev=False)
    options.add_argument("--processes", type=int, metavar="N", help="number of processes; default: as the script says")
    options.add_argument(
        "--trust-script", action="store_true", help="run the script without the kernel's confinement, as bash does"
    )
    options.add_argument("script", metavar="SCRIPT", help="the launch script")
    options.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    options.set_defaults(refused=False)
    return options


def report(result: Launch, cwd: Path, done: Record, processes: int | None) -> bool:
    """Print what the parser says about one command; returns whether it is accepted."""
    count = processes or result.processes or grid(result.flags)
    launcher = " ".join(Path(word).name if word.startswith("/") else word for word in result.launcher)
    stated = (
        f"{count} processes" if processes or result.processes else f"number of processes unknown: checked for {count}"
    )
    print(f"{' '.join([launcher, Path(result.program).name]).strip()} ... ({stated})")
    for flag, after in zip(result.launcher, [*result.launcher[1:], "-"]):
        if flag in done.empty and after.startswith("-"):
            print(f"{flag}: {empty(flag, done)}, and the number of processes is a guess")
    name = Path(result.program).name
    if not name.startswith(("pretrain_gpt", "pretrain_llama")):
        print(f"{name} is another program: only its flags are checked, as those of pretrain_gpt.py")
    try:
        config = parsed(result.flags, result, cwd, done, count)
    except Refusal as refusal:
        report_refusals(refusal, result, done)
        return False
    print("accepted" + (", with these notes:" if config.notes else ""))
    for note in config.notes:
        print(f"  - {with_script_paths(note, done)}")
    print("start it with\n  " + command(result, shlex.join(result.flags)))
    return True


def shape_of(folder: str, step: int | None, skip: bool) -> dict[str, Any] | None:
    """The settings for --use-checkpoint-args, if the checkpoint is on this machine."""
    from megatron.training.checkpoint import arguments_of  # imports torch, which few scripts need

    return arguments_of.shape_of(folder, step, skip)


def report_refusals(refusal: Refusal, result: Launch, done: Record) -> None:
    """Print what is refused, and the command that would be accepted."""
    print("refused" if len(refusal.parts) == 1 else f"refused, for {len(refusal.parts)} reasons")
    for part in refusal.parts:
        flag = part.about[0] if part.about else ""
        blamed = isinstance(part, Unreadable) and flag in done.empty
        print(f"  - {flag}: {empty(flag, done)}" if blamed else f"  - {with_script_paths(str(part), done)}")
    if isinstance(refusal, Refusals) and refusal.command is not None:
        print(
            f"this would be accepted ({refusal.changes}):\n"
            f"  {command(result, with_script_paths(refusal.command, done))}"
        )


def empty(flag: str, done: Record) -> str:
    """Which variable of the script left a flag without a value, and what to do."""
    name = done.empty[flag]
    if name.isdecimal():
        return f"the script's argument ${name} is empty: give it after the script's name"
    return f"the script's variable {name} is empty: set it, for example by {name}=VALUE before this command"


def recorded_path(word: str, cwd: Path, done: Record) -> str:
    """A word of the command; a file that the script wrote is replaced by the path of the recorded file."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    file = Path(f"{done.folder}/files{cwd / value}") if value else None
    return f"{flag}{equals}{file}" if file and file.is_file() else word


def with_script_paths(text: str, done: Record) -> str:
    """A text in which paths within the record's folder are replaced by the script's paths."""
    return text.replace(f"{done.folder}/files", "")


def command(result: Launch, flags: str) -> str:
    """The command of ``result`` with this repository's program and these flags."""
    program = "pretrain_llama.py" if "llama" in Path(result.program).name else "pretrain_gpt.py"
    return f"{shlex.join([*result.launcher, program])} {flags}"


def report_others(done: Record) -> None:
    """Print which other programs the script called."""
    starters = {result.launcher[0] for call in done.calls if (result := launch(call.words)) and result.launcher}
    names = Counter(
        Path(call.words[0]).name
        for call in done.calls
        if not launch(call.words) and call.words[0] not in starters - {"python", "python3"}
    )
    named = [name if count == 1 else f"{name} ({count} times)" for name, count in names.items() if name not in SILENT]
    if named:
        print(f"not run: {', '.join(named)}")
    asked = [call.words for call in done.calls if call.words[0].startswith("python") and "-c" in call.words[:3]]
    for words in asked:
        print(f"  {shlex.join(words)[:120]}: its output is unknown here, and counts as empty")


def missing_files(script: Path, done: Record) -> str:
    """What a message about the script says of files that it did not find; "" if it found all."""
    sourced = (call.words[1] for call in done.calls if call.words[0] == "source" and len(call.words) > 1)
    named = [*MISSING.findall(with_script_paths(done.output, done)), *sourced]
    for placeholder in PLACEHOLDER.findall(script.read_text(errors="replace") + done.output):
        if "syntax error" in done.output or any(placeholder[1:].startswith(name) for name in named):
            return f"has a placeholder, {placeholder}: put your own value in its place"
    files = some([*dict.fromkeys(named)])
    where = "does not exist on this machine: copy it here, or set the variable that names its folder"
    return f"reads {files}, which {where}" if named else ""


def report_nothing(script: Path, done: Record) -> None:
    """Print why no training command was found."""
    if done.returncode is None:
        print(f"error: {script} did not end within {SECONDS} s, and was stopped", file=sys.stderr)
    elif missing := missing_files(script, done):
        print(
            f"error: {script} {missing}; without it, it started no training program (its exit code is "
            f"{done.returncode})",
            file=sys.stderr,
        )
    else:
        print(
            f"error: {script} started no training program with flags such as --num-layers (its exit code is "
            f"{done.returncode}): give the arguments that it needs after its name",
            file=sys.stderr,
        )
    for line in done.output.strip().splitlines()[-5:]:
        print(f"  {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
