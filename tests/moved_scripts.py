# SPDX-License-Identifier: Apache-2.0
"""Published launch scripts, moved by tools/move.py, and dry runs of the moved scripts.

`tests/unit/data/moved_scripts.json` has a record of each: its repository and commit, how it is started, the plan, the
size of the diff, what was left to the user, the moved command, and its dry run. The scripts themselves are their
authors'; give the folder of their clones (OWNER+NAME in it) to make the record again:

    python -m tests.moved_scripts CLONES --write DIFFS    # all; writes the record, and each diff into the folder DIFFS
    python -m tests.moved_scripts CLONES mamba            # only scripts with this in their path; prints the record
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tools import move
from tools.check_script import training_commands

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "unit" / "data" / "moved_scripts.json"
LENGTH = "32K"
# Flags of a moved command that name files of the author's, or programs that are not installed here.
FILES = "data-path tokenizer-type tokenizer-model vocab-file merge-file save load tensorboard-dir wandb-project split"
FILES += " exit-on-missing-checkpoint async-save enable-hf2mg-convert wandb-exp-name data-cache-path"
FILES += " use-checkpoint-args train-data-path valid-data-path test-data-path finetune padded-vocab-size"


def moved(clones: Path, script: dict[str, Any], diffs: Path | None) -> dict[str, Any]:
    """The record of one script."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(clones / script["repository"].replace("/", "+"), tree, symlinks=True)
        file, target = tree / script["path"], Path(folder) / "moved.sh"
        text = file.read_text()
        for old, new in script.get("filled_in", {}).items():  # what the author leaves to the user
            assert old in text, old
            text = text.replace(old, new)
        file.write_text(text)
        os.chdir(file.parent if script.get("in_its_folder") else tree)
        words = f"{file} --seq-length {LENGTH} --gpus {script['gpus']} --gpu H100 --no-dry-run --output {target}"
        words += f" {script.get('options', '')} -- {script.get('arguments', '')}"
        output = StringIO()
        with patch.dict(os.environ, script.get("environment", {})), redirect_stdout(output), redirect_stderr(output):
            code = move.main(shlex.split(words))
            printed = output.getvalue().replace(f"{tree}/", "")
            if diffs:
                (diffs / f"{script['repository']}-{file.name}.txt".replace("/", "+")).write_text(printed)
            known = ("repository", "commit", "path", "gpus", "environment", "arguments", "options", "filled_in")
            result = {name: script[name] for name in (*known, "in_its_folder") if name in script}
            if code:
                return result | {"refused": printed.strip().splitlines()[-1]}
            shutil.copy(target, file)
            (Path(folder) / "calls").mkdir()
            launches, _ = training_commands(
                file, shlex.split(script.get("arguments", "")), Path(folder) / "calls", True
            )
        lines, after = printed.splitlines(), target.read_text()
        changed = sum(line[0] in "+-" for line in difflib.ndiff(text.splitlines(), after.splitlines()))
        left = [line for line in takewhile(lambda line: line.startswith("- "), reversed(lines))]
        flags = with_stand_ins(launches[0][0].flags, script)
        result |= {"plan": next(line for line in lines if line.startswith("Plan: ")).removeprefix("Plan: ")}
        result |= {"changed_lines": changed, "left_to_the_user": [line[2:] for line in reversed(left)]}
        return result | {"command": shlex.join(flags), "dry_run": dry_run(flags, script["gpus"])}


def with_stand_ins(flags: list[str], script: dict[str, Any]) -> list[str]:
    """The moved command with mock data in place of the author's files."""
    dropped = {f"--{name}" for name in [*FILES.split(), "vocab-size"]}
    kept = [option for option in move.options(flags) if option[0] not in dropped and "split-path" not in option[0]]
    return [*move.flat(kept), "--mock-data", "--tokenizer-type", "NullTokenizer", *script["options"].split()]


def dry_run(flags: list[str], gpus: int) -> str:
    """What a dry run of a moved command says: time and whether it fits, or the refusal."""
    words = [sys.executable, "pretrain_gpt.py", *flags, "--dry-run", "--world-size", str(gpus), "--gpu", "H100-80G"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    text = " ".join((done.stdout + done.stderr).split())
    found = re.search(r"a step takes [^(]*\(simulated\), MFU [\d.]+ %|error: .*", text)
    fits = re.search(r"default allocator the step (fits, with [\d.]+ GiB|[^>]*)", text)
    return f"{found[0] if found else text[-300:]}; {fits[1] if fits else 'no word on memory'}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path)
    parser.add_argument("part", nargs="?", default="")
    parser.add_argument("--write", type=Path, metavar="DIFFS")
    args = parser.parse_args(argv)
    scripts, clones = json.loads(RECORD.read_text()), args.clones.resolve()
    diffs = args.write and args.write.resolve()
    for number, script in enumerate(scripts):
        if args.part in f"{script['repository']}/{script['path']}":
            scripts[number] = moved(clones, script, diffs)
            print(json.dumps(scripts[number], indent=1), flush=True)
            if diffs:
                RECORD.write_text(json.dumps(scripts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
