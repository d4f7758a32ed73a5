# SPDX-License-Identifier: Apache-2.0
"""Turns an sbatch command into shell code that sets its script, its arguments and Slurm's variables.

Runs as a separate program within the confined shell of ``launch_script.py``, without site-packages.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import shlex

from tools.launch_command import slurm

NO_VALUE = """exclusive parsable requeue no-requeue wait hold test-only verbose quiet oversubscribe overcommit
spread-job use-min-nodes reboot contiguous no-kill get-user-env nice propagate ignore-pbs help usage version""".split()
NO_VALUE_SHORT = "HhIkOQsvVW"


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """sbatch's own options, and the script with its arguments."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        name = words[at]
        long, short = name[2:] in NO_VALUE or "=" in name, len(name) > 2 or name[1:] in NO_VALUE_SHORT
        at += 1 if (long if name.startswith("--") else short) else 2
    return words[:at], words[at:]


def code(words: list[str], files: str) -> str:
    """Code for ``_submit`` of launch_setup.sh: it sets the variables script or text, words, slurm and receipt.

    Args:
        files: folder of the files that the script has written.
    """
    options, rest = split(words)
    wrap = next((option.removeprefix("--wrap=") for option in options if option.startswith("--wrap=")), "")
    if "--wrap" in options[:-1]:
        at = options.index("--wrap")
        wrap = options.pop(at + 1)
    script, text = "", wrap
    if not rest and not wrap:
        text = sys.stdin.read()
    if rest and not wrap:
        path = os.path.abspath(rest[0])
        script = next((place for place in (files + path, path) if os.path.isfile(place)), path)
        if os.path.isfile(script):
            with open(script, errors="replace") as file:
                text = file.read()
    kept = [option for option in options if not option.startswith("--wrap")] or ["--parsable"]
    variables = slurm(f"{text}\n#SBATCH {' '.join(kept)}\n")
    exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    receipt = "1" if "--parsable" in options else "Submitted batch job 1"
    values = {"script": script, "text": "" if script else text, "slurm": f"export {exported}", "receipt": receipt}
    lines = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join([*lines, f"words=({shlex.join(rest[1:])})"])


if __name__ == "__main__":
    print(code(sys.argv[2:], sys.argv[1]))
