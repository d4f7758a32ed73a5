#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Say what becomes of a launch script here, without starting anything.

    python tools/check_script.py train_llama.sh
    python tools/check_script.py --processes 64 train_llama.sh 8B /data   # what follows the script is the script's

The script runs in bash with stand-ins for every program: torchrun, deepspeed, srun, python and whatever else it calls
are written down, not started; what it would write goes to a folder that is thrown away; jobs that it submits by sbatch
are followed. The kernel (Landlock, seccomp) sees to that whatever the script tries: it can read files, and nothing
else. Its training commands are then read as pretrain_gpt.py would read them. Exit code 0: all are taken; 2: one is
refused; 1: the script starts none.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from megatron.training.arguments import validate
from megatron.training.arguments.models import LLAMA_DEFAULTS
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal, Refusals, reason
from tools.launch_command import Launch, grid, launch, slurm
from tools.launch_confined import why_not
from tools.launch_script import SECONDS, Record, record

EXIT_NOTHING, EXIT_REFUSED = 1, 2
SILENT = ("cd", "mkdir", "tee", "source", "export", "bash", "sh", "sbatch")  # of no interest


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    script = Path(args.script)
    if not script.is_file():
        print(f"error: {script} is not a file", file=sys.stderr)
        return EXIT_REFUSED
    try:
        return check(script, args)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
    except OSError as error:
        print(f"error: {script}: {reason(error)}", file=sys.stderr)
    return EXIT_REFUSED


def check(script: Path, args: argparse.Namespace) -> int:
    """Run the script with stand-ins, print what becomes of each training command; returns the exit code.

    Raises:
        Refusal: the script cannot be confined here, or meddled with the record of its calls.
        OSError: it cannot be read.
    """
    if not args.trust_script and (why := why_not()):
        raise Refusal(
            f"{why}, and a script may do more than start a program: read {script}, and if you would run it yourself, "
            "give --trust-script"
        )
    job = slurm(script.read_text(errors="replace"))
    with tempfile.TemporaryDirectory() as folder:
        environment = {**job, **os.environ}
        done = record(
            script.resolve(), args.arguments, Path.cwd(), environment, Path(folder), confined=not args.trust_script
        )
        launches = []
        for call in done.calls:
            if found := launch(call.words, call.tasks):
                if (found, call.cwd) not in launches:
                    launches.append((found, call.cwd))
        for found, cwd in launches:
            taken = tell(found, cwd, done, args.processes)
            args.refused = args.refused or not taken
        others(done)
    if not launches:
        nothing(script, done)
        return EXIT_NOTHING
    return EXIT_REFUSED if args.refused else 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    found.add_argument("--processes", type=int, metavar="N", help="processes of the run; default: as the script says")
    found.add_argument(
        "--trust-script", action="store_true", help="run its shell without the kernel's confinement, as bash would"
    )
    found.add_argument("script", metavar="SCRIPT", help="the launch script")
    found.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")
    found.set_defaults(refused=False)
    return found


def tell(found: Launch, cwd: Path, done: Record, processes: int | None) -> bool:
    """Print what our parser says of one command; whether it is taken."""
    count = processes or found.processes or grid(found.flags)
    launcher = " ".join(Path(word).name if "/" in word else word for word in found.launcher)
    stated = f"{count} processes" if processes or found.processes else f"processes left open: read for {count}"
    print(f"{' '.join([launcher, Path(found.program).name]).strip()} ... ({stated})")
    for flag, after in zip(found.launcher, [*found.launcher[1:], "-"]):
        if flag in done.empty and after.startswith("-"):
            print(f"{flag}: {empty(flag, done)}, and the number of processes is a guess")
    name = Path(found.program).name
    if not name.startswith(("pretrain_gpt", "pretrain_llama")):
        print(f"{name} is another program: its flags are read as pretrain_gpt.py's, whatever else it does")
    defaults = LLAMA_DEFAULTS if "pretrain_llama" in name else None
    flags = [written(word, cwd, done) for word in found.flags]
    before = Path.cwd()
    os.chdir(cwd)
    try:
        # the script is for machines that have what it asks for
        with patch.object(validate, "transformer_engine_installed", lambda: True):
            config = parse(flags, defaults, count, shape_of)
    except Refusal as refusal:
        refusals(refusal, found, done)
        return False
    finally:
        os.chdir(before)
    print("taken" + (", with these notes:" if config.notes else ""))
    for note in config.notes:
        print(f"  - {unwritten(note, done)}")
    print("start it with\n  " + command(found, shlex.join(found.flags)))
    return True


def shape_of(folder: str, step: int | None, skip: bool) -> dict[str, Any] | None:
    """For --use-checkpoint-args, where the checkpoint is on this machine."""
    from megatron.training.checkpoint import arguments_of  # imports torch, which few scripts need

    return arguments_of.shape_of(folder, step, skip)


def refusals(refusal: Refusal, found: Launch, done: Record) -> None:
    """Print what is refused, and the command that would be taken."""
    lines = [str(part) for part in refusal.parts]
    print("refused" if len(lines) == 1 else f"refused, for {len(lines)} reasons")
    for line in lines:
        flag = line.partition(" ")[0].rstrip(":")
        blamed = flag in done.empty and re.match(rf"{flag}(: expected | has no value|: invalid )", line)
        print(f"  - {flag}: {empty(flag, done)}" if blamed else f"  - {unwritten(line, done)}")
    if isinstance(refusal, Refusals) and refusal.command is not None:
        print(f"taken would be, {refusal.changes}\n  {command(found, unwritten(refusal.command, done))}")


def empty(flag: str, done: Record) -> str:
    """Which variable of the script left a flag without a value, and the way out."""
    name = done.empty[flag]
    if name.isdecimal():
        return f"the script's argument ${name} is empty: give it after the script's name"
    return f"the script's variable {name} is empty: set it, for example by {name}=VALUE before this command"


def written(word: str, cwd: Path, done: Record) -> str:
    """A word of the command, where it names a file that the script wrote: the file it wrote."""
    flag, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    file = Path(f"{done.folder}/files{cwd / value}") if value else None
    return f"{flag}{equals}{file}" if file and file.is_file() else word


def unwritten(text: str, done: Record) -> str:
    return text.replace(f"{done.folder}/files", "")


def command(found: Launch, flags: str) -> str:
    """The same command for our program, with these flags."""
    own = "pretrain_llama.py" if "llama" in Path(found.program).name else "pretrain_gpt.py"
    return f"{shlex.join([*found.launcher, own])} {flags}"


def others(done: Record) -> None:
    """Name what the script called beside its training commands."""
    starters = {found.launcher[0] for call in done.calls if (found := launch(call.words)) and found.launcher}
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
        print(f"  {shlex.join(words)[:120]}: what it prints is unknown here, and was taken as empty")


def nothing(script: Path, done: Record) -> None:
    """Say why no training command was seen."""
    if done.returncode is None:
        print(f"error: {script} did not end within {SECONDS} s, and was stopped", file=sys.stderr)
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
