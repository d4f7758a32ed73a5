# SPDX-License-Identifier: Apache-2.0
"""Imports go in one direction: a package uses packages below it, never those above."""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests import pairs
from tests.conftest import SLOW
from tests.shared import Shared

pytest_plugins = "pytester"
ROOT = Path(__file__).parents[2]

# Packages, the lowest first. A module belongs to the package with the longest name that is a prefix of its own name.
PACKAGES = [
    "system",
    "decisions",
    "formulas",
    "platform",
    "certifying.of_torch",
    "certifying.scripts",
    "certifying",
    "context_parallel.layout",
    "context_parallel.positions",
    "context_parallel.attention.kernels",
    "context_parallel.attention",
    "context_parallel.linear_attention",
    "context_parallel.sparse_attention",
    "context_parallel.fpdt",
    "context_parallel.huggingface",
    "context_parallel.core",
    "context_parallel",  # the public names
    "training.refusal",
    "training.disk",
    "training.json_file",
    "training.ownership",
    "training.untrusted",
    "training.settings",
    "training.families",
    "training.arguments",
    "training.data",
    "training.model",
    "training.checkpoint.megatron_lm",
    "training.checkpoint.hugging_face",
    "training.checkpoint",
    "training.checkpoint.converting",
    "training.report",
    "training",  # the program itself
    "certifying.programs",
    "inference",
    "simulator.machines",
    "simulator.cost",
    "simulator.dry_run",
    "simulator.planner",
    "simulator",
]
WITHOUT_CORE = ("system", "decisions", "certifying", "certifying.of_torch", "certifying.scripts",
                "context_parallel.layout", "context_parallel.positions", "context_parallel.attention",
                "context_parallel.attention.kernels", "context_parallel.linear_attention",
                "context_parallel.sparse_attention", "context_parallel.fpdt",
                "context_parallel.huggingface", "formulas", "training.refusal", "training.disk", "training.json_file",
                "training.ownership", "simulator.machines", "simulator.cost", "simulator.planner")  # fmt: skip


OURS = tuple(f"megatron.{name.split('.')[0]}" for name in PACKAGES)
MODULES = {
    ".".join(path.relative_to(ROOT / "megatron").with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "megatron").rglob("*.py")
}


@cache
def package_of(module: str) -> str:
    return max((name for name in PACKAGES if f"{module}.".startswith(f"{name}.")), key=len)


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str) -> Iterator[str]:
    """Every module of megatron that ``module`` imports anywhere in its code, named without ``megatron.``."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
            for name in node.names:
                whole = f"{node.module}.{name.name}".removeprefix("megatron.")
                yield whole if whole in MODULES else node.module.removeprefix("megatron.")
        elif isinstance(node, ast.Import):
            yield from (n.name.removeprefix("megatron.") for n in node.names if n.name.startswith("megatron."))


@cache
def imported() -> dict[str, list[str]]:
    return {module: list(imports(module)) for module in sorted(MODULES)}


def test_imports_go_downwards():
    above = [
        f"megatron.{module} ({package_of(module)}) must not use megatron.{used} ({package_of(used)})"
        for module, every in imported().items()
        for used in every
        if not used.startswith("core") and PACKAGES.index(package_of(used)) > PACKAGES.index(package_of(module))
    ]
    assert not above


def test_no_two_modules_import_each_other_directly_or_indirectly():
    within = {name: {one for one in used if one in MODULES and one != name} for name, used in imported().items()}
    done: set[str] = set()
    while ready := {module for module, used in within.items() if module not in done and used <= done}:
        done |= ready
    assert not set(within) - done, f"these are in a cycle of imports, or import one: {sorted(set(within) - done)}"


def private_uses(module: str) -> Iterator[str]:
    """Uses of unittest, and of other modules' private names."""
    own: set[str] = set()  # names of our modules
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OURS):
            yield from (f"{node.module}.{n.name}" for n in node.names if n.name.startswith("_"))
            ours = (n for n in node.names if f"{node.module}.{n.name}".removeprefix("megatron.") in MODULES)
            own |= {n.asname or n.name for n in ours}
        names = [n.name for n in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        yield from (name for name in [*names, getattr(node, "module", None) or ""] if name.startswith("unittest"))
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
            if node.attr.startswith("_"):
                yield f"{node.value.id}.{node.attr}"


def test_no_module_patches_or_uses_private_names_of_another():
    """Functions that a simulation replaces are marked at their definition: platform/hooks.py."""
    assert not {module: used for module in MODULES if (used := list(private_uses(module)))}


def test_basenames_are_unique_and_folders_small():
    paths = [path for path in MODULES.values() if path.name != "__init__.py"]
    twice = [name for name, count in Counter(path.name for path in paths).items() if count > 1]
    assert not twice, "two modules of one name"
    folders = Counter(path.parent for path in MODULES.values())
    crowded = {str(folder): count for folder, count in folders.items() if count > 12}
    assert not crowded, "more than 12 modules in one folder"


def test_the_wheel_has_every_package(monkeypatch: pytest.MonkeyPatch):
    core = pytest.importorskip("distutils.core", reason="comes with setuptools")
    monkeypatch.chdir(ROOT)
    packages = core.run_setup("setup.py", stop_after="init").packages
    here = {".".join(path.relative_to(ROOT).parent.parts) for path in ROOT.glob("megatron/*/**/*.py")}
    assert here <= set(packages)


def test_packages_without_megatron_core():
    using = [module for module, used in imported().items() if any(name.startswith("core") for name in used)]
    assert using and not [module for module in using if package_of(module) in WITHOUT_CORE]


def test_packages_have_a_short_docstring():
    for package in PACKAGES:
        if (ROOT / "megatron" / package.replace(".", "/")).is_dir():
            text = ast.get_docstring(tree_of(package))
            assert text and len(text.splitlines()) <= 14, package


@pytest.mark.parametrize("grids", ["2x2", pytest.param("2x1 1x2", marks=pytest.mark.full)])
@pytest.mark.lab
def test_attention_and_fpdt_where_megatron_core_is_not_installed(grids):
    program = [sys.executable, str(ROOT / "tests" / "without_core.py"), *grids.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr


def test_errors_of_the_library_name_arguments_and_never_flags():
    for module in MODULES:
        if not module.startswith("context_parallel"):
            continue
        tree = tree_of(module)
        documented = (n for n in ast.walk(tree) if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef)))
        docstrings = {ast.get_docstring(node, clean=False) for node in documented}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
                assert not re.search(r"--[a-z]", node.value), f"{module}:{node.lineno}"


# Which tests run: covered pairs, --quick and --full, and values that are made once.


def test_settings_of_a_command_line() -> None:
    flags = "--ulysses-parallel-size 1 --ring-parallel-size 4 --zero-stage 3 --fpdt --fpdt-chunk-size 22 --bf16"
    assert pairs.settings(flags) == {"--ring-parallel-size", "--zero-stage 3", "--fpdt-chunk-size", "--bf16"}


def test_few_cases_cover_every_pair() -> None:
    axes = ("--tensor", "--ulysses", "--ring", "--zero")
    cases = [frozenset(f"{axis} {n}" for axis, n in zip(axes, levels)) for levels in product(range(3), repeat=4)]
    assert len(pairs.pairs({"--tensor 2", "--zero 1", "--bf16"})) == 5  # no setting, each setting, and the pair of axes
    held = [pairs.pairs(levels) for levels in cases]
    kept = pairs.covering(held, [1.0] * len(cases))
    assert set().union(*(held[index] for index in kept)) == set().union(*held)
    assert 9 <= len(kept) <= 16  # of 81; nine are sufficient, but the choice is greedy
    assert kept == pairs.covering(held, [1.0] * len(cases))


CASES = """
import pytest

@pytest.mark.quick
def test_quick(): pass
@pytest.mark.parametrize("n", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.usual(0, 2)
def test_grids(n): pass
@pytest.mark.lab
@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.full)])
def test_faults(n): pass
"""


@pytest.mark.parametrize(
    "option, tests",
    [("", "quick grids[0] grids[3]"), ("--quick", "quick"), ("--lab", "grids[1] faults[0]"),
     ("--full", "quick grids[0] grids[1] grids[2] grids[3] faults[0] faults[1]")],
)  # fmt: skip
def test_which_cases_run(pytester: pytest.Pytester, option: str, tests: str) -> None:
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(CASES)
    found = pytester.inline_run("-p", "no:cacheprovider", *option.split())
    ran = [report.nodeid.partition("::test_")[2] for report in found.getreports() if report.when == "call"]
    assert " ".join(ran) == tests


def test_slow_files_exist() -> None:
    assert SLOW <= {path.name for path in Path(__file__).parent.glob("test_*.py")}


def make_and_count(folder: Path) -> int:
    def make() -> int:
        with open(folder / "made", "a") as file:
            file.write("x")
        return 3

    return Shared(folder / "shared")("key", make)


def test_processes_make_a_value_once(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=make_and_count, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert make_and_count(tmp_path) == 3 and (tmp_path / "made").read_text() == "x"
