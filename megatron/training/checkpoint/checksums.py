# SPDX-License-Identifier: Apache-2.0
"""Whether a checkpoint's files are those that were written: sizes and CRC-32 of all of them, looked at before loading.

``checksums.json`` lists them. Of a checkpoint without it, which an earlier version or another program wrote, only the
sizes can be told, from ``.metadata``.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.shelf import checkpoints_before
from megatron.training.checkpoint.writer import Sum, write_bytes
from megatron.training.refusal import Refusal

CHECKSUMS = "checksums.json"
BLOCK = 1 << 22  # bytes read at once


def write_sums(folder: Path, sums: Mapping[str, Sum]) -> None:
    """List all other files of a checkpoint. Raises OSError."""
    listed = {name: asdict(one) for name, one in sorted(sums.items())}
    write_bytes(folder / CHECKSUMS, json.dumps(listed, indent=1).encode(), {})


def damage(path: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, in one line that names the first one; None if nothing is.

    Args:
        share, shares: read the contents of one file in ``shares``. Sizes are looked at of all.
    """
    if path.name.startswith("iter_") and not (path / "metadata.json").exists():
        return f"{path / 'metadata.json'} is missing"
    try:
        sums = _listed(path)
        if sums is None:
            return _no_json(path / "metadata.json") or _too_short(path)
        for name, listed in sums.items():
            size = (path / name).stat().st_size
            if size != listed.size:
                return f"{path / name} has {size} bytes, {listed.size} were written"
        for name in [name for number, name in enumerate(sums) if number % shares == share]:
            if _crc32(path / name) != sums[name].crc32:
                return f"{path / name} is not what was written (its CRC-32 differs)"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except OSError as error:
        return f"{error.filename or path}: {error.strerror or error}"
    return None


def _listed(path: Path) -> dict[str, Sum] | None:
    if not (path / CHECKSUMS).exists():
        return None
    try:
        return {str(name): Sum(**one) for name, one in json.loads((path / CHECKSUMS).read_text()).items()}
    except (ValueError, TypeError, AttributeError):
        raise OSError(0, "cannot be read", str(path / CHECKSUMS)) from None


def _no_json(path: Path) -> str | None:
    """A file in which there is something else; None if there is none."""
    if not path.exists():
        return None
    try:
        readable = isinstance(json.loads(path.read_bytes()), dict)
    except ValueError:
        readable = False
    return None if readable else f"{path} cannot be read"


def _too_short(path: Path) -> str | None:
    """Files that end before the last tensor that should lie in them."""
    if not (path / ".metadata").exists():
        return None  # another form, whose reader says what is missing
    try:
        places = unpickle.read_metadata(path / ".metadata").storage_data.values()
        ends: dict[str, int] = {}
        for place in places:
            ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    except (Refusal, AttributeError, TypeError) as error:
        return str(error) if isinstance(error, Refusal) else f"{path / '.metadata'} cannot be read"
    for name, end in ends.items():
        size = (path / name).stat().st_size
        if size < end:
            return f"{path / name} has {size} bytes, at least {end} were written"
    return None


def _crc32(path: Path) -> int:
    sum_, block = 0, bytearray(BLOCK)
    view = memoryview(block)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            sum_ = zlib.crc32(view[:count], sum_)
    return sum_


def choose_whole(found: Path, settings: CheckpointConfig, notes: list[str]) -> Path:
    """``found`` if it is whole; else the next older one if that was asked for. All ranks call it, each reads its share.

    Args:
        notes: where a line goes that says what was passed over.

    Raises:
        Refusal: on every rank; ``found`` is damaged, with the way to take the next older whole one.
    """
    wrong = _damage_together(found)
    if wrong is None:
        return found
    number = found.name.removeprefix("iter_")
    earlier = [list(checkpoints_before(found.parent, int(number)) if number.isdigit() else ())]
    dist.broadcast_object_list(earlier)  # a folder in a network may look different to each
    iteration, older = next((one for one in earlier[0] if _damage_together(one[1]) is None), (0, None))
    line = f"checkpoint {found} is damaged: {wrong}"
    if older is None:
        refusal = Refusal(f"{line}; there is no older whole one in {found.parent}")
    elif settings.skip_damaged_checkpoints and found.parent == Path(settings.load):
        notes.append(
            f"WARNING: {line}; --skip-damaged-checkpoints: going on from {older}, {int(number) - iteration} "
            "iterations are done again"
        )
        return older
    else:
        refusal = Refusal(
            f"{line}; the next older whole one is {older}: take it with --ckpt-step {iteration}, or have it taken with "
            "--skip-damaged-checkpoints"
        )
    refusal.everywhere = True
    raise refusal


def _damage_together(path: Path) -> str | None:
    """The first rank's complaint, on all ranks."""
    told: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, damage(path, dist.get_rank(), dist.get_world_size()))
    return next((line for line in told if line), None)


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    """See to it that all ranks read one and the same checkpoint meanwhile. All ranks enter it.

    Another job may save in that folder: remove this checkpoint, or put another of the same iteration in its place.

    Raises:
        Refusal: it was removed or replaced.
    """
    changed = f"checkpoint {path} was removed or replaced while it was loaded, by a job that saves there: start again"
    before = _fingerprint(path)
    try:
        yield
    except Refusal:
        if path.exists():
            raise
        raise Refusal(changed) from None
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (before, _fingerprint(path)))
    if len({one for pair in seen for one in pair}) > 1:
        refusal = Refusal(changed)
        refusal.everywhere = True
        raise refusal


def _fingerprint(path: Path) -> int | None:
    """What tells a checkpoint from another one under the same name: its list of sums. None without one."""
    try:
        return zlib.crc32((path / CHECKSUMS).read_bytes())
    except OSError:
        return None
