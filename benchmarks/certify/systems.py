# SPDX-License-Identifier: Apache-2.0
"""The systems of the matrix. To add one:

1. Write ``with_NAME.py`` with ``step(case, **sizes)``, which returns the ``cp.Outcome`` of one training step as the
   library's documentation says to write it. On a grid of ones it returns the right outcome: ``cases.whole(case)``, or
   its own model on one process (then ``own_reference=True``). Where the library has no such feature, it raises
   ``NotApplicable("why")``; where the library refuses by an error of another type than
   :data:`benchmarks.certify.matrix.REFUSALS`, it raises ``Refused("the library's text")``.
2. Add a line to :data:`SYSTEMS`.
3. List its released wheels in ``requirements/NAME.txt``, with versions and without torch. The command installs each
   such file without dependencies into a folder of its own, and puts the folders of a system in front of the running
   environment. So list what the wheels import, too. A file may list another version of something that the environment
   has, for example of transformers.
4. ``python benchmarks/certify/matrix.py --system NAME`` prints its cells; with ``--record``, it writes them into
   matrix.json; ``--page`` writes the table of docs/use/certify.md.
5. Each cell that is wrong in silence needs a program in ``programs/`` (at most 40 lines, only that library and torch),
   which ``shown_by`` names.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "megatron-longcontext" / "matrix"


@dataclass(frozen=True)
class System:
    """A library in one of its modes.

    Attributes:
        program: ``with_PROGRAM.py``.
        grid: sizes with which the program is called on ranks.
        needs: ``requirements/NAME.txt`` for each name; empty: what this project itself needs.
        packages: whose versions the table names.
        own_reference: the program's outcome on one process is its own, not ``cases.whole``.
        shown_by: the program in ``programs/`` that shows an error, by case; "" is for all cases that are not named.
        options: further arguments of the program.
        python: the oldest Python that the library takes; "": any.
    """

    program: str
    grid: Mapping[str, int]
    needs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("torch",)
    own_reference: bool = False
    shown_by: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""


WITH_DEEPSPEED, WITH_TRL = ("deepspeed",), ("trl", "deepspeed")
DEEPSPEED = ("deepspeed", "transformers")
TRAINER = ("accelerate", *DEEPSPEED)
LAYERS, TRAINERS, VERL = "deepspeed_layers.py", "trainer_sp.py", "verl_ulysses.py"
DOUBLED = {"": "deepspeed_zero_stage.py", "window": LAYERS, "packed documents": LAYERS, "hybrid": LAYERS}
OTHER_MEAN = {"accumulation, unequal": TRAINERS, "experts, aux loss": TRAINERS}
ULYSSES, RING = {"sequence": 2, "context": 1}, {"sequence": 1, "context": 2}
SYSTEMS: dict[str, System] = {
    "ours, Ulysses": System("ours", {"ulysses": 2, "ring": 1}),
    "ours, Ring": System("ours", {"ulysses": 1, "ring": 2}),
    "PyTorch": System("pytorch", {"ranks": 2}),
    "PyTorch, flex": System("pytorch_flex", {"ranks": 2}),
    "DeepSpeed": System("deepspeed", {"ranks": 2}, WITH_DEEPSPEED, DEEPSPEED, True, {"": LAYERS}),
    "DeepSpeed, ZeRO 2": System(
        "deepspeed", {"ranks": 2}, WITH_DEEPSPEED, DEEPSPEED, True, DOUBLED, options={"stage": 2}
    ),
    "DeepSpeed AutoSP": System(
        "deepspeed_autosp", {"ranks": 2}, WITH_DEEPSPEED, DEEPSPEED, True, {"": "deepspeed_autosp.py"}
    ),
    "accelerate sp": System("accelerate", ULYSSES, WITH_DEEPSPEED, TRAINER, True, {"": TRAINERS}),
    "accelerate sp, ZeRO 2": System(
        "accelerate", ULYSSES, WITH_DEEPSPEED, TRAINER, True, DOUBLED | OTHER_MEAN, options={"stage": 2}
    ),
    "accelerate cp": System("accelerate", RING, WITH_DEEPSPEED, TRAINER, own_reference=True),
    "TRL sp": System("trl", ULYSSES, WITH_TRL, ("trl", *TRAINER), True, {"": TRAINERS}),
    "TRL cp": System("trl", RING, WITH_TRL, ("trl", *TRAINER), own_reference=True),
    "ring-flash-attn": System(
        "ring_flash_attn", {"ranks": 2}, ("ring_flash_attn",), ("ring-flash-attn", "transformers")
    ),
    "yunchang ring": System(
        "yunchang",
        {"ulysses": 1, "ring": 2},
        ("yunchang",),
        ("yunchang", "transformers"),
        shown_by={"window": "yunchang_window.py"},
    ),
    "yunchang Ulysses": System("yunchang", {"ulysses": 2, "ring": 1}, ("yunchang",), ("yunchang", "transformers")),
    "fla": System("fla", {"ranks": 2}, ("fla",), ("fla-core",)),
    "verl": System("verl", {"ranks": 2}, ("verl",), ("verl", "transformers"), shown_by={"": VERL}),
    "verl, sdpa": System(
        "verl", {"ranks": 2}, ("verl",), ("verl", "transformers"), shown_by={"": VERL}, options={"attention": "sdpa"}
    ),
    "megatron-core": System(
        "megatron_core", {"ranks": 2}, (), ("megatron-core",), True, {"": "megatron_core_loss.py"}, python="3.12"
    ),
    "megatron-core, per token": System(
        "megatron_core", {"ranks": 2}, (), ("megatron-core",), True, options={"per_token": True}, python="3.12"
    ),
}


def python_of(version: str) -> str:
    """A Python of this version with what this project needs: the running one, or else that of tests/other_core.sh."""
    if not version or sys.version_info >= tuple(map(int, version.split("."))):
        return sys.executable
    made = subprocess.run(
        ["bash", HERE.parents[1] / "scripts" / "setup.sh", "dev"], check=True, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"VENV": str(CACHE.parent / version)},
    )  # fmt: skip
    return made.stdout.strip()


def folder_of(name: str) -> Path:
    """The folder with the packages of ``requirements/NAME.txt``, installed if it is not there.

    It is called site-packages, because datasets pickles modules of other folders.
    """
    file = HERE / "requirements" / f"{name}.txt"
    key = hashlib.sha256(f"{file.read_text()}{sys.version}".encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}" / "site-packages"
    done = folder.with_name("installed")
    if not done.exists():
        command = ["-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(folder), "-r", str(file)]
        subprocess.run([sys.executable, *command], check=True)
        done.touch()
    return folder


def environment_of(needs: Sequence[str]) -> dict[str, str]:
    """Environment variables of a process that has these packages and this repository."""
    paths = [*map(folder_of, needs), HERE.parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    interpreted = {"TRITON_INTERPRET": "1"} if "fla" in needs else {}  # has to be set before Triton is imported
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | interpreted
