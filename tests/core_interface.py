# SPDX-License-Identifier: Apache-2.0
"""What our source uses of megatron-core, with the parameters and defaults that the installed version has.

python -m tests.core_interface          # prints what the installed version has changed and core_interface.json
                                        # does not name
python -m tests.core_interface --add    # adds it there: write what we do about it in place of "?"
python -m tests.core_interface --write  # with megatron-core 0.16.1: writes its interface
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch.autograd import Function

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".json")
Parameters = dict[str, str]  # default values as text, by the name of a parameter; "" has none
Interface = dict[str, "Parameters | None"]  # None: the version does not have it


def sources() -> list[Path]:
    """Our modules that may import megatron-core."""
    return [path for folder in ("megatron", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


def used() -> tuple[set[str], set[str]]:
    """The full names of what is imported from megatron-core, and the names of methods that our classes may share.

    Attributes of imported modules count as imported: ``parallel_state.get_data_parallel_group``.
    """
    imported, names = set(), set()
    for path in sources():
        modules = {}
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.core"):
                for name in node.names:
                    imported.add(f"{node.module}.{name.name}")
                    modules[name.asname or name.name] = f"{node.module}.{name.name}"
            elif isinstance(node, ast.ClassDef):
                names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()":
                names.add(node.attr)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                imported.add(f"{modules[node.value.id]}.{node.attr}")
    return imported, names


def find(name: str) -> Any:
    """The object with this full name, or None if the installed version does not have it there."""
    module, _, last = name.rpartition(".")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            package = importlib.import_module(module)
            with suppress(ImportError):  # a module that nothing has imported yet
                importlib.import_module(name)
            return getattr(package, last, None)
    except ImportError:  # a class with an attribute, or a module that is gone
        return getattr(find(module), last, None) if module else None


def parameters(function: Any) -> Parameters | None:
    """Its parameters in their order; None if it has no signature."""
    try:
        known = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    empty = inspect.Parameter.empty
    return {str(p).split(":")[0].split("=")[0]: "" if p.default is empty else _text(p.default) for p in known}


def _text(default: Any) -> str:
    return re.sub(r" at 0x\w+", "", getattr(default, "__qualname__", None) or repr(default))


def interface() -> Interface:
    """Every function and class of core that our source uses, and the methods of these that it overrides or calls."""
    imported, names = used()
    found: Interface = {}
    for name in sorted(imported):
        thing, parent = find(name), find(name.rpartition(".")[0])
        if inspect.ismodule(thing) or inspect.isclass(thing) and issubclass(thing, Enum):
            continue
        if inspect.isclass(parent) and issubclass(parent, Function) and name.endswith(".apply"):  # is torch's
            continue
        found[name] = parameters(thing) if callable(thing) else ({} if thing is not None else None)
        if inspect.isclass(thing):
            found |= {f"{name}.{method}": parameters(value) for method, value in _methods(thing) if method in names}
    return found


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in inspect.getmembers(kind, callable):
        owner = next((base for base in kind.__mro__ if name in vars(base)), kind)
        if not name.startswith("__") and owner.__module__.startswith("megatron.core"):
            yield name, value


def changes(before: Interface, now: Interface) -> dict[str, list[str]]:
    """For each name what differs, as short texts: gone, new, ``-parameter``, ``+parameter=default``, changed, moved."""
    result = {}
    for name, old in before.items():
        if name not in now or (new := now[name]) == old:  # no longer used, or unchanged
            continue
        if old is None or new is None:
            result[name] = ["gone" if new is None else "new"]
            continue
        both = [parameter for parameter in old if parameter in new]
        found = [f"-{parameter}" for parameter in old if parameter not in new]
        found += [f"+{parameter}={default}" for parameter, default in new.items() if parameter not in old]
        found += [f"{key}: {old[key]} -> {new[key]}" for key in both if old[key] != new[key]]
        if not is_dataclass(find(name)) and any([*old].index(key) != [*new].index(key) for key in both):
            found.append("order")  # settings are given by name
        result[name] = found
    return result


def recorded() -> tuple[Interface, dict[str, dict[str, str]]]:
    """The interface of core 0.16.1, and what differs in later versions, with what we do about it.

    Nothing needs to be done about a new parameter whose default keeps the old behaviour; its text is empty.
    """
    record = json.loads(RECORD.read_text())
    return record["interface"], record["changes"]


def write(known: Interface, judged: dict[str, dict[str, str]]) -> None:
    """Write the record, with one line for each name."""

    def lines(table: dict[str, Any]) -> str:
        return ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(table.items()))

    RECORD.write_text(f'{{"interface": {{\n{lines(known)}\n }}, "changes": {{\n{lines(judged)}\n }}}}\n')


def main(options: list[str]) -> None:
    now = interface()
    if "--write" in options:
        return write(now, recorded()[1] if RECORD.exists() else {})
    known, judged = recorded()
    for name in sorted(now.keys() - known.keys()):
        print(name, "is not recorded: use --write with megatron-core 0.16.1")
    for name, found in changes(known, now).items():
        for change in found:
            if change not in judged.get(name, {}):
                print(name, change)
                judged.setdefault(name, {})[change] = "" if change.startswith("+") else "?"
    if "--add" in options:
        write(known, judged)


if __name__ == "__main__":
    main(sys.argv[1:])
