#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The console command of an installed package: ``longcontext NAME ...`` runs what ``python tools/NAME.py ...`` runs.

Each program is one file, which works in a clone and in an installed package. On several processes, the training
programs are started as ``torchrun --nproc-per-node 8 --no-python longcontext pretrain-llama ...``.
"""

from __future__ import annotations

import ast
import runpy
import sys
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "tools" / "plan.py").exists() else HERE / "longcontext_programs"  # a clone, or site-packages
FIRST = ("plan", "memory", "check-script", "move", "preprocess", "pretrain-gpt", "pretrain-llama", "convert",
         "evaluate", "generate")  # fmt: skip
SHORT = {"preprocess": "preprocess-data", "convert": "convert-hf"}


def programs() -> dict[str, Path]:
    """The file of each program, by the name of its command."""
    starts = '\nif __name__ == "__main__":'
    tools = sorted(path for path in (ROOT / "tools").glob("*.py") if not path.name.startswith("launch_"))
    files = [path for path in tools if starts in path.read_text()]
    named = {path.stem.replace("_", "-"): path for path in (*ROOT.glob("pretrain_*.py"), *files)}
    return named | {short: named[name] for short, name in SHORT.items()}


def listing() -> str:
    """One line for each program: the first sentence of its file."""
    result = programs()
    order = [*FIRST, *(name for name in result if name not in FIRST and name not in SHORT.values())]
    lines = [(ast.get_docstring(ast.parse(result[name].read_text())) or "").split("\n")[0] for name in order]
    return "\n".join(f"  {name:22} {line}" for name, line in zip(order, lines))


def check_packages() -> None:
    """End this process if megatron.training is not ours.

    Since 0.17, megatron-core contains a package of that name: in a clone it would be found first, and installed after
    this package, its ``__init__.py`` replaces ours.
    """
    sys.path.insert(0, str(HERE))
    ours = find_spec("megatron.training")
    if ours is None or "SPDX-License-Identifier" not in Path(ours.origin or "").read_text():
        sys.exit(
            "longcontext: error: megatron-core was installed after this package and has replaced a part of it: "
            "pip install --force-reinstall --no-deps megatron-longcontext"
        )


def main(argv: list[str] | None = None) -> None:
    """Run the program that the first argument names; it ends this process."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(f"usage: longcontext NAME [ARGUMENTS]; longcontext NAME --help explains one\n\n{listing()}")
        return
    result = programs()
    if name not in result:
        near = get_close_matches(name, result, 1)
        hint = f"did you mean {near[0]}?" if near else "longcontext --help lists them"
        sys.exit(f"longcontext: error: no program is named {name!r}; {hint}")
    check_packages()
    sys.argv = [f"longcontext {name}", *rest]
    runpy.run_path(str(result[name]), run_name="__main__")


if __name__ == "__main__":
    main()
