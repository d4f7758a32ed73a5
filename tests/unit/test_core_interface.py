# SPDX-License-Identifier: Apache-2.0
"""What this program uses of megatron-core has the same meaning in every version that it runs with.

A version that changes something fails here with the name of it: see ``tests/core_interface.py``.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.platform import core_versions
from tests import core_interface
from tests.patience import patience

ROOT = Path(__file__).parents[2]
# Overrides that leave out parameters of core's method, and why no call gives them. The constructors are called by this
# program alone, with parameters of their own.
LEFT_OUT = {
    "AllToAll.dispatch_postprocess": "the same two parameters under our names, which core gives by position",
    "ExpertRouter.__init__": "",
    "Experts.__init__": "",
    "LaterTokenLayer.forward": "only LongContextGPT calls it",
    "PartitionedEmbedding.__init__": "",
    "NormedWords.__init__": "all are passed on",
    "CachedAttention.__init__": "",
    "Writer.__init__": "",
    "TokenDataset.__init__": "",
    "LocalBuilder._build_megatron_dataset_splits": "all are passed on",
    "FullySharded.__init__": "",
}


def test_every_change_of_the_installed_version_is_known():
    """A new process, because other tests let core run on a CPU with functions that replace some of core's."""
    known, judged = core_interface.recorded()
    command = [sys.executable, "-W", "ignore", "-m", "tests.core_interface"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    assert not done.stdout, f"{done.stdout}see tests/core_interface.py"
    for name, texts in judged.items():
        for change, what_we_do in texts.items():
            assert what_we_do not in ("", "?") or change.startswith("+") and what_we_do == "", (name, change)


def our_overrides() -> Iterator[tuple[str, Callable, Callable]]:
    """(its name, our method, core's method) for each method of core that a class of ours overrides."""
    for path in core_interface.sources():
        if "megatron.core" not in path.read_text() or "tools" in path.parts:
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__:
                for name, method in vars(kind).items():
                    base = next((base for base in kind.__mro__[1:] if name in vars(base)), None)
                    if base is not None and base.__module__.startswith("megatron.core"):
                        pair = [getattr(one, "__func__", one) for one in (method, vars(base)[name])]
                        if all(map(inspect.isfunction, pair)):
                            yield f"{kind.__name__}.{name}", *pair


def test_every_override_accepts_what_core_may_pass():
    """core 0.19 passes names and packed sequences to parts that 0.16 called without."""
    found = 0
    for name, ours, of_core in our_overrides():
        found += 1
        accepted, passed = inspect.signature(ours).parameters, inspect.signature(of_core).parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
            continue
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = {key for key, parameter in passed.items() if parameter.kind not in variable}
        assert name in LEFT_OUT or named <= accepted.keys(), f"{name} does not accept {named - accepted.keys()}"
    assert found > 50


@pytest.mark.parametrize("name, text", core_versions.NOTICES.items())
def test_notices_of_core_are_dropped_and_other_warnings_are_not(name: str, text: str, caplog):
    core_versions.silence_notices()
    caplog.set_level(logging.WARNING)
    for line in (f"{text} and more", "another warning"):
        logging.getLogger(name).warning(line)
    assert [record.getMessage() for record in caplog.records] == ["another warning"]


def test_no_module_compares_versions_of_core():
    for path in core_interface.sources():
        text = path.read_text()
        assert "is_mcore_version" not in text and "core.__version__" not in text, path
