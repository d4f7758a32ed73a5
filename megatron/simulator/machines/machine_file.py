# SPDX-License-Identifier: Apache-2.0
"""Reads a machine's JSON file, merges it with the file that it extends, and checks each field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron.decisions.block_sizes import BlockTable, measured_of
from megatron.decisions.kernel_order import CROSSOVER, KERNELS
from megatron.simulator.machines.machine import KINDS, Calibration, Link, Machine, Measured, Power, Rate, Runtime
from megatron.simulator.machines.nccl_model import ALGORITHMS, GENERATIONS, Algorithm, Collectives
from megatron.training.json_file import read_json
from megatron.training.refusal import Refusal, nearest, short

MACHINES = Path(__file__).parent
VENDOR = re.compile(
    r"nvidia|tesla|sxm\d?|hbm\d?e?", re.IGNORECASE
)  # words of a GPU's name that do not tell kinds apart
Json = dict[str, Any]

LONGEST_NAME = 255  # bytes of a file's name, on most systems
POWERS = {"gemm": 3.0, "attention": 1.0, "attention_backward": 1.0, "head_size": 1.0}
OPTIONAL = (
    "sources", "collective", "head_size", "dtype", "calibration", "capability", "kernels", "kernel_rates",
    "attention_kernel", "crossover", "attention_blocks", "power", "collectives", "dispatch", "runtime", "uncertain",
)  # fmt: skip
REQUIRED = [f.name for f in fields(Machine) if f.name not in OPTIONAL]
PRICED = (*KERNELS, "flash1")  # with FlashAttention 1, which published runs used


def known() -> list[str]:
    """Names of the machines that come with the package."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def load(name_or_path: str | Path) -> Machine:
    """A machine by name (``A100-80G``, in any case), or from a user's JSON file (docs/use/machine-files.md).

    Raises:
        Refusal: the name is unknown, or a field of the file is wrong; the message names file and field.
    """
    return read_machine(find(name_or_path))


def find(name_or_path: str | Path) -> Path:
    """The file of a known machine's name, or of the usual one that begins with it, or the path that was given.

    Raises:
        Refusal: the text is neither a known name, nor ends in ``.json``, nor is the path of a file.
    """
    text = str(name_or_path)
    if (path := find_known(text)) is not None:
        return path
    if text.endswith(".json") or Path(text).is_file():
        return Path(text)
    plain = "-".join(word for word in re.split(r"[-_ /]+", text) if not VENDOR.fullmatch(word))
    plain = re.sub(r"(\d)GB\b", r"\1G", plain, flags=re.IGNORECASE)
    begun = [name for name in known() if re.match(f"{re.escape(plain)}(?![0-9A-Za-z])", name, re.IGNORECASE)]
    usual = [name for name in begun if name.count("-") == 1] or begun  # not those with a lower power limit
    if plain and len(usual) == 1:
        return find_known(usual[0])
    if plain and begun:
        raise Refusal(f"--gpu {text}: one of several: use {' or '.join(begun)}")
    raise Refusal(
        f"--gpu {text}: unknown; the nearest is {nearest(plain, known())}; {_known_names()}, or the path of a JSON "
        "file of your own"
    )


def find_known(name: str) -> Path | None:
    """The file of a machine that comes with the package, by its name in any case; a path is not accepted."""
    return {path.stem.lower(): path for path in MACHINES.glob("*.json")}.get(name.lower())


def _known_names() -> str:
    return f"use {', '.join(known())}"


def read_machine(path: Path) -> Machine:
    """The machine that a file describes.

    Raises:
        Refusal: the file cannot be read, or a field is missing, unknown or wrong.
    """
    return machine_of(path, read_fields(path))


def machine_of(path: Path, raw: Json) -> Machine:
    """The machine of a file ``path``, which need not exist yet, with the fields ``raw``."""
    raw = merged(path, raw)
    refuse_unknown(path, "", raw, [f.name for f in fields(Machine)])
    for name in REQUIRED:
        if name not in raw:
            raise Refusal(f'{path}: {name}: missing; give it, or build on a known machine with "extends"')
    machine = Machine(**{name: READERS[name](path, name, value) for name, value in raw.items()})
    if machine.gpus % machine.network.gpus_per_card:
        raise Refusal(
            f"{path}: network.gpus_per_card: {machine.network.gpus_per_card} does not divide the {machine.gpus} gpus "
            "of a node"
        )
    return machine


def read_merged(path: Path, below: tuple[Path, ...] = ()) -> Json:
    """The fields of a file, merged over those of the file that it extends; ``below``: files that extend this one."""
    return merged(path, read_fields(path), below)


def merged(path: Path, raw: Json, below: tuple[Path, ...] = ()) -> Json:
    """``raw`` merged over the fields of the file that it extends, without the sources of replaced figures."""
    if path.resolve() in below:
        raise Refusal(f"{path}: extends: a file cannot build on itself")
    raw = {"name": path.stem} | raw
    base_name = raw.pop("extends", None)
    if base_name is None:
        return raw
    if not isinstance(base_name, str) or Path(base_name).name != base_name or len(base_name) > LONGEST_NAME:
        raise Refusal(
            f"{path}: extends: give a known machine's name, or that of a file in the same folder, "
            f"not {short(base_name)}"
        )
    base_path = path.parent / base_name if base_name.endswith(".json") else find_known(base_name)
    if base_path is None:
        raise Refusal(
            f"{path}: extends: {base_name}: unknown; {_known_names()}, or the name of a .json file in the same folder"
        )
    base = read_merged(base_path, (*below, path.resolve()))
    sources = base.get("sources", {})
    if isinstance(sources, dict):  # a replaced figure has another source
        base["sources"] = {key: text for key, text in sources.items() if not is_replaced(key, raw)}
    uncertain = base.get("uncertain", {})
    if isinstance(uncertain, dict):  # the base's uncertainty does not apply to a replaced figure
        base["uncertain"] = {key: ends for key, ends in uncertain.items() if not is_replaced(f"calibration.{key}", raw)}
    return merge(base, raw)


def is_replaced(key: str, over: Json) -> bool:
    """Whether ``over`` replaces the figure that ``key`` names (``gemm``, ``link``, ``link.latency``)."""
    name, _, inner = key.partition(".")
    value = over.get(name)
    return name in over and (not isinstance(value, dict) or not inner or inner in value)


def merge(base: Json, over: Json) -> Json:
    """``over`` merged over ``base``: objects are merged, other values replaced."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merge(base[key], value) if both else value
    return result


def read_fields(path: Path) -> Json:
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise Refusal(f"{path}: holds {type(raw).__name__}, not the fields of a machine (docs/use/machine-files.md)")
    return raw


def refuse_unknown(path: Path | str, where: str, raw: Json, names: list[str]) -> None:
    """Refuse fields of ``raw`` that are not in ``names``; ``where``: the path of the object in the file, with a dot."""
    for key in raw:
        if key not in names:
            close = get_close_matches(key, names, n=1)
            hint = f"do you mean {close[0]}?" if close else f"fields are {', '.join(names)}"
            raise Refusal(f"{path}: {where}{key}: no such field; {hint}")


def members(path: Path, name: str, value: Any, what: str, names: Iterable[str]) -> Json:
    """A JSON object that may only have the members ``names``; ``what``: its contents, for the message."""
    if not isinstance(value, dict):
        raise Refusal(f"{path}: {name}: must be an object with {what}, not {short(value)}")
    refuse_unknown(path, f"{name}.", value, list(names))
    return value


def number(path: Path | str, name: str, value: Any, *, above: bool = True) -> float:
    """A number above 0; with ``above`` False, of 0 or more."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above and value == 0):
        raise Refusal(f"{path}: {name}: must be a number {'above 0' if above else 'of 0 or more'}, not {short(value)}")
    return float(value)


def seconds(path: Path, name: str, value: Any) -> float:
    return number(path, name, value, above=False)


def whole(path: Path, name: str, value: Any) -> int:
    if number(path, name, value) % 1:
        raise Refusal(f"{path}: {name}: must be a whole number, not {short(value)}")
    return int(value)


def text(path: Path | str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise Refusal(f"{path}: {name}: must be text, not {short(value)}")
    return value


def label(path: Path, name: str, value: Any) -> str:
    """A name for tables and pages, where brackets would be markup."""
    if len(text(path, name, value)) > 80 or not value.isprintable() or set("[]") & set(value):
        raise Refusal(f"{path}: {name}: must be at most 80 printable characters without brackets, not {short(value)}")
    return value


def share(path: Path, name: str, value: Any) -> float:
    if not 0 <= number(path, name, value, above=not name.endswith(("overlap", "interleaved"))) <= 2:
        raise Refusal(f"{path}: {name}: is a share of another figure, at most 2, not {short(value)}")
    return float(value)


def rate(path: Path, name: str, value: Any, power: float | None = None) -> Rate:
    """Points [[size, FLOP/s], ...] with rising sizes."""
    if not isinstance(value, list) or not value or any(not isinstance(p, list) or len(p) != 2 for p in value):
        raise Refusal(f"{path}: {name}: must be a list of [size, rate] pairs, not {short(value)}")
    points = tuple((number(path, name, size), number(path, name, speed)) for size, speed in value)
    if any(low[0] >= high[0] for low, high in zip(points, points[1:])):
        raise Refusal(f"{path}: {name}: sizes must rise, these are {', '.join(f'{size:g}' for size, _ in points)}")
    return Rate(points, POWERS[name] if power is None else power)


def peak(path: Path, name: str, value: Any) -> dict[str, float]:
    for dtype in ("bf16", "fp32"):
        if not isinstance(value, dict) or dtype not in value:
            raise Refusal(f"{path}: {name}.{dtype}: missing; give FLOP/s for bf16 and fp32")
    return {dtype: number(path, f"{name}.{dtype}", speed) for dtype, speed in value.items()}


def dtype_name(path: Path, name: str, value: Any) -> str:
    if value not in ("bf16", "fp32"):
        raise Refusal(f"{path}: {name}: must be bf16 or fp32, not {short(value)}")
    return value


def capability(path: Path, name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(part) is not int or part < 0 for part in value):
        raise Refusal(f"{path}: {name}: must be [major, minor], such as [9, 0], not {short(value)}")
    return value[0], value[1]


def by_name(read_one: Callable, names: Iterable[str], what: str) -> Callable:
    """A function that reads a JSON object whose members ``names`` are all read by ``read_one``."""

    def read(path: Path, name: str, value: Any) -> dict[str, Any]:
        given = members(path, name, value, what, names)
        return {key: read_one(path, f"{name}.{key}", item) for key, item in given.items()}

    return read


def kernel_rates(path: Path, name: str, value: Any) -> dict[str, tuple[Rate, Rate]]:
    result = {}
    for kernel, tables in members(path, name, value, "tables by kernel", PRICED).items():
        where = f"{name}.{kernel}"
        both = ("attention", "attention_backward")
        members(path, where, tables, " and ".join(both), both)
        if len(tables) < 2:
            raise Refusal(f"{path}: {where}: give attention and attention_backward")
        result[kernel] = tuple(rate(path, f"{where}.{way}", tables[way], POWERS[way]) for way in both)
    return result


def attention_blocks(path: Path, name: str, value: Any) -> BlockTable:
    try:
        return measured_of(value)
    except ValueError as error:
        raise Refusal(f"{path}: {error}") from None


def kernel_name(path: Path, name: str, value: Any) -> str:
    if value not in ("auto", *KERNELS):
        *others, last = KERNELS
        raise Refusal(f"{path}: {name}: must be auto, {', '.join(others)} or {last}, not {short(value)}")
    return value


def record(kind: type, readers: dict[str, Callable], needed: tuple[str, ...] = ()) -> Callable:
    """A function that reads a JSON object as the dataclass ``kind``."""

    def read(path: Path, name: str, value: Any) -> Any:
        members(path, name, value, ", ".join(readers), readers)
        for key in needed:
            if key not in value:
                raise Refusal(f"{path}: {name}.{key}: missing")
        return kind(**{key: readers[key](path, f"{name}.{key}", item) for key, item in value.items()})

    return read


def ranges(path: Path, name: str, value: Any) -> dict[str, tuple[float, float]]:
    """[lowest, highest] of shares of ``calibration``, by name."""
    result, names = {}, [f.name for f in fields(Calibration)]
    for key, item in members(path, name, value, "[lowest, highest] by share", names).items():
        where = f"{path}: {name}.{key}"
        if not isinstance(item, list) or len(item) != 2:
            raise Refusal(f"{where}: must be [lowest, highest], not {short(item)}")
        low, high = (share(path, f"{name}.{key}", end) for end in item)
        if low > high:
            raise Refusal(f"{where}: the lowest, {low:g}, is above the highest, {high:g}: exchange them")
        result[key] = (low, high)
    return result


def limits(path: Path, name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != 3:
        raise Refusal(f"{path}: {name}: must be three rates, in a node, on two nodes and on more, not {short(value)}")
    return tuple(number(path, name, item) for item in value)


def collectives(path: Path, name: str, value: Any) -> Collectives:
    """A generation, and what differs from it: figures of an algorithm, or null where NCCL cannot use it."""
    generation = value.get("generation") if isinstance(value, dict) else None
    if not isinstance(generation, str) or generation not in GENERATIONS:
        raise Refusal(f"{path}: {name}.generation: must be {', '.join(GENERATIONS)}")
    refuse_unknown(path, f"{name}.", value, ["generation", "post", *ALGORITHMS])
    base, given = GENERATIONS[generation], {}
    for key, item in value.items():
        where = f"{name}.{key}"
        if key == "post":
            given[key] = seconds(path, where, item)
        elif key in ALGORITHMS and item is None:
            if not key.endswith("128") and not key.startswith(("nvls", "pat")):
                raise Refusal(f"{path}: {where}: NCCL always has this algorithm: give figures, not null")
            given[key] = None
        elif key in ALGORITHMS:
            members(path, where, item, ", ".join(ALGORITHM), ALGORITHM)
            figures = {part: ALGORITHM[part](path, f"{where}.{part}", figure) for part, figure in item.items()}
            if (default := getattr(base, key)) is None:
                for part in ("start", "step", "hop", "between" if key == "nvls_tree" else "share"):
                    if part not in figures:
                        raise Refusal(f"{path}: {where}.{part}: missing; {generation} has no figures of {key}")
            given[key] = replace(default, **figures) if default else Algorithm(**figures)
    return replace(base, **given)


def notes(path: Path, name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise Refusal(f"{path}: {name}: must be an object, field by field, not {short(value)}")
    return {key: text(path, f"{name}.{key}", item) for key, item in value.items()}


MEASURED = record(Measured, {"bandwidth": number, "latency": seconds}, ("bandwidth", "latency"))
LINK_FIELDS = {"bandwidth": number, "latency": seconds, "name": label}
HOST_LINK = record(Link, LINK_FIELDS, ("bandwidth", "latency"))
WITH_KINDS = LINK_FIELDS | {"kinds": by_name(MEASURED, KINDS, ", ".join(KINDS))}
LINK = record(Link, WITH_KINDS, ("bandwidth", "latency"))
NETWORK = record(Link, WITH_KINDS | {"gpus_per_card": whole}, ("bandwidth", "latency"))
ALGORITHM = {"start": seconds, "step": seconds, "hop": seconds, "share": share, "between": share, "limits": limits}
READERS: dict[str, Callable] = {
    **dict.fromkeys(("memory", "memory_bandwidth", "host_memory"), number),
    **dict.fromkeys(("reserved", "launch", "collective", "dispatch"), seconds),
    **dict.fromkeys(("gemm", "attention", "attention_backward", "head_size"), rate),
    "name": label,
    "peak": peak,
    "gpus": whole,
    "link": LINK,
    "host_link": HOST_LINK,
    "network": NETWORK,
    "sources": notes,
    "dtype": dtype_name,
    "capability": capability,
    "kernels": by_name(share, PRICED, "shares by kernel"),
    "kernel_rates": kernel_rates,
    "attention_kernel": kernel_name,
    "crossover": by_name(number, CROSSOVER, "rows of a tile by kernel"),
    "attention_blocks": attention_blocks,
    "power": record(Power, {"limit": number, "rated": number, "idle": seconds}, ("limit", "rated", "idle")),
    "collectives": collectives,
    "runtime": record(Runtime, {f.name: seconds for f in fields(Runtime)}),
    "calibration": record(Calibration, {f.name: share for f in fields(Calibration)}),
    "uncertain": ranges,
}
