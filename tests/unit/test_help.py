# SPDX-License-Identifier: Apache-2.0
"""What starts without a package: --help and the planner without torch, every module without those of the extras."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import longcontext
from tests.patience import patience

ROOT = Path(__file__).parents[2]
FOLDER = sorted(path for path in (ROOT / "tools").glob("*.py") if path.name != "launch_redirect.py")  # has no --help
TOOLS = [path for path in FOLDER if re.search(r"^def main\(.*__main__", path.read_text(), re.M | re.S)]
ENTRIES = [ROOT / "pretrain_gpt.py", ROOT / "pretrain_llama.py"]
WITHOUT_TORCH = """
import resource, runpy, sys
sys.modules["torch"] = None  # importing it now fails
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"ended {end.code or 0} after {used.ru_utime + used.ru_stime:.2f} s", file=sys.stderr)
"""


def run(*words: str) -> tuple[int, float]:
    """The exit code of a program that cannot import torch, and its seconds of CPU."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
    result = re.search(r"ended (\d+) after ([\d.]+) s", done.stderr)
    assert result, done.stderr
    return int(result[1]), float(result[2])


def test_the_list_has_the_known_tools() -> None:
    assert {path.name for path in TOOLS} > {"plan.py", "memory.py", "plot_tiles.py", "measure_hardware.py"}


@pytest.mark.parametrize("path", [*TOOLS, *ENTRIES], ids=lambda path: path.stem)
def test_help_is_printed_fast_and_without_torch(path: Path) -> None:
    code, seconds = run(str(path), "--help")
    assert code == 0 and seconds < patience(0.7)


@pytest.mark.parametrize(
    "words", ["plan.py --model llama3-8b --gpus 4 --seq-length 32K", "memory.py --model llama3-8b --gpus 4"]
)
def test_a_plan_needs_no_torch(words: str) -> None:
    tool, *flags = words.split()
    assert run(f"tools/{tool}", *flags, "--gpu", "A100-80G")[0] == 0


EXTRAS = """
    triton transformer_engine flash_attn pyarrow s3fs ray accelerate peft pytest hypothesis datasets
    deepspeed trl moto mkdocs
""".split()
WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # importing one of them now fails
import megatron
for part in ("context_parallel", "training", "inference", "platform", "decisions", "simulator", "formulas"):
    package = importlib.import_module(f"megatron.{part}")
    for module in pkgutil.walk_packages(package.__path__, f"megatron.{part}."):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            print(module.name, error)
"""
OF_TRITON = {
    "megatron.context_parallel.attention.kernels.triton_kernels.triton_ahead",
    "megatron.context_parallel.attention.kernels.triton_kernels.triton_backward",
    "megatron.context_parallel.attention.kernels.triton_kernels.triton_forward",
    "megatron.context_parallel.attention.kernels.triton_kernels.triton_pairs",
    "megatron.context_parallel.attention.kernels.triton_kernels.triton_plain",
    "megatron.context_parallel.fpdt.loss_kernel",
    "megatron.context_parallel.linear_attention.decay_kernels",
    "megatron.context_parallel.linear_attention.state_kernels",
    "megatron.context_parallel.positions.rope_kernel",
    "megatron.context_parallel.sparse_attention.chosen_kernels",
}


@pytest.mark.lab
def test_modules_import_without_packages_of_extras() -> None:
    """On a machine without a GPU, where PyTorch brings no Triton; core's modules may need it too."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, " ".join(EXTRAS)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    failed = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    assert failed.keys() == OF_TRITON and all("triton" in error for error in failed.values()), failed


# ``longcontext NAME`` runs the programs of tools/, in a clone and in the folders of a wheel.


ARGUMENTS = ["memory", "--model", "llama3-8b", "--gpus", "8", "--gpu", "A100-80G", "--seq-length", "32K"]


@pytest.fixture(params=["clone", "wheel"])
def command(request, tmp_path: Path) -> list[str]:
    if request.param == "clone":
        return [sys.executable, str(ROOT / "longcontext.py")]
    shutil.copy(ROOT / "longcontext.py", tmp_path)
    programs = tmp_path / "longcontext_programs"
    shutil.copytree(ROOT / "tools", programs / "tools")
    for path in ROOT.glob("pretrain_*.py"):
        shutil.copy(path, programs)
    return [sys.executable, str(tmp_path / "longcontext.py")]


def run_command(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.usual(1)
def test_a_program_prints_what_its_file_prints(command, tmp_path):
    expected = run_command([sys.executable, str(ROOT / "tools" / ARGUMENTS[0]) + ".py", *ARGUMENTS[1:]])
    result = run_command([*command, *ARGUMENTS])
    assert not result.returncode and result.stdout == expected.stdout and "8" in result.stdout
    refused = run_command([*command, "memory", "--model", "none"])
    assert refused.returncode and "error" in refused.stderr and len(refused.stderr.splitlines()) <= 3


def test_every_program_is_listed_with_a_sentence(capsys):
    longcontext.main(["--help"])
    lines = capsys.readouterr().out.splitlines()[2:]
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert set(longcontext.FIRST) < set(listed) and all(len(sentence) > 20 for sentence in listed.values())
    assert not {name for name in listed if name.startswith("launch")}


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(SystemExit, match="no program is named 'pln'; did you mean plan"):
        longcontext.main(["pln"])
    with pytest.raises(SystemExit, match="longcontext --help lists them"):
        longcontext.main(["zzzz"])


def test_a_part_that_megatron_core_replaced_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Since 0.17, megatron-core contains a package megatron.training too."""
    longcontext.check_packages()
    (tmp_path / "__init__.py").write_text("# of another program\n")
    monkeypatch.setattr(longcontext, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    with pytest.raises(SystemExit, match="megatron-core was installed after this package.*--force-reinstall"):
        longcontext.check_packages()
