# SPDX-License-Identifier: Apache-2.0
"""Find the checkpoint to load in a folder, whose files are named as in Megatron-LM, and the common state in it.

The tracker, a file in the folder, names the latest checkpoint. It is updated after a checkpoint gets its name, so a
kill between the two leaves a checkpoint newer than the tracker's. All other contradictions are refused, because a
start from an older state, or from none, would overwrite checkpoints.

The common state is what a checkpoint holds apart from tensors: settings, progress and the optimizer's numbers. It is
the file ``common.pt``, which we always write and every megatron-core reads; from 0.19 on core's own saver writes it as
an object among the tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, one_line, permitted, refusing
from megatron.training.untrusted.links import file_in

COMMON, METADATA = "common.pt", ".metadata"
STATE = "common_state/shard_0_1"  # core's name of the object that replaces common.pt
TRACKER = "latest_checkpointed_iteration.txt"
OTHER_FORMS = (
    ("mp_rank_*", "of Megatron-LM's older format torch"),
    ("*mp_rank_*_model_states.pt", "of DeepSpeed's own format"),
    ("zero", "a universal checkpoint of DeepSpeed"),
)


@permitted()
def checkpoint_path(
    folder: Path, step: int | None, *, whole: bool = True, notes: list[str] | None = None
) -> Path | None:
    """The checkpoint of iteration ``step``, or the latest; None if ``step`` is None and there is no checkpoint.

    A Hugging Face folder is a checkpoint itself.

    Args:
        whole: refuse a checkpoint that is missing or incomplete; if False, its path is returned.
        notes: receives a line if the latest is not the one that the tracker names.

    Raises:
        Refusal: it is missing, incomplete, or in a format that cannot be loaded; or it is not clear which is the
            latest.
    """
    if step is None:
        name = _latest(folder, whole, [] if notes is None else notes)
        if name is None:
            return folder if is_hugging_face(folder) else _refuse_others(folder)
    else:
        name = f"iter_{step:07d}"
    path = folder / name
    if (path / "metadata.json").exists():
        _refuse_zarr(path)
        return path
    for pattern, kind in OTHER_FORMS:
        if path.is_dir() and any(path.glob(pattern)):
            if pattern == "zero":
                raise Refusal(f"checkpoint {path} is {kind}: add --universal-checkpoint")
            raise Refusal(
                f"checkpoint {path} is {kind}: convert it with python tools/convert_checkpoint.py --from {folder} "
                "--to DIR, and pass --load DIR --finetune"
            )
    if (path / METADATA).exists() and not (path / COMMON).exists():
        raise Refusal(
            f"checkpoint {path} is of Megatron-LM's format torch_dcp or fsdp_dtensor: save it there with "
            "--ckpt-format torch_dist"
        )
    if not whole and name.startswith("iter_"):
        return path
    raise Refusal(
        f"checkpoint {path} is missing or incomplete: choose another one with --ckpt-step, or pass "
        "--skip-damaged-checkpoints to go on from the next older one"
    )


def _latest(folder: Path, whole: bool, notes: list[str]) -> str | None:
    """Name of the latest checkpoint; None if there is neither a tracker nor a checkpoint."""
    tracker, listed = folder / TRACKER, checkpoints_in(folder)  # the list is read first: a job may be saving there
    if not tracker.exists():
        if not listed:
            return None
        newest = max(listed)
        if len(listed) > 1 or run_of(listed[newest]) is None:
            raise Refusal(
                f"{folder} holds checkpoints up to iteration {newest}, but no {TRACKER}, which names the latest: write "
                f"{newest} to it, or choose with --ckpt-step"
            )
        notes.append(
            f"{tracker} is missing, as after a kill: continuing from {listed[newest]}, the only checkpoint there"
        )
        return listed[newest].name
    text = name_in(tracker)
    if text == "release":
        return text
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise Refusal(
            f"{tracker} says {text!r}, which is neither an iteration nor release: write the iteration of a checkpoint "
            "to it, or choose with --ckpt-step"
        )
    named = int(text)
    run = run_of(folder / f"iter_{named:07d}")
    newer = [] if run is None else [number for number in listed if number > named and run_of(listed[number]) == run]
    if len(newer) > 1 and whole:
        raise Refusal(
            f"{tracker} says {named}, and newer checkpoints of the same run are there, up to iteration {max(newer)}: "
            f"write {max(newer)} to it to go on from there, or go back with --ckpt-step {named}"
        )
    if newer:
        notes.append(
            f"{tracker} says {named}, but iteration {max(newer)} of the same run is there, as after a kill just before "
            f"the file was updated: continuing from {max(newer)}; --ckpt-step {named} goes back"
        )
    return f"iter_{max(newer, default=named):07d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Folders that look like checkpoints, by iteration, oldest first."""
    paths = {}
    for path in folder.glob("iter_[0-9]*"):
        number = path.name.removeprefix("iter_")
        if number.isascii() and number.isdecimal() and len(number) < 16 and path.is_dir():  # not iter_0000010.bak
            paths[int(number)] = path
    return dict(sorted(paths.items()))


def iteration_of(path: Path | None) -> int:
    """A checkpoint's iteration by its name; 0 for None and for other names."""
    number = path.name.removeprefix("iter_") if path else ""
    return int(number) if number.isdigit() else 0


def run_of(path: Path) -> str | None:
    """The identity of the run that a checkpoint belongs to; empty if the program that wrote it stored none.

    None if unknown: the checkpoint is incomplete, has another format, or has the name of another iteration.
    """
    if not (path / "metadata.json").exists():
        return None
    try:
        common = common_state(path)
        progress = common.get("progress", common)  # Megatron-LM stores the iteration at the top level
        return str(progress.get("run", "")) if int(progress["iteration"]) == iteration_of(path) else None
    except (Refusal, OSError, AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None


def name_in(tracker: Path) -> str:
    """The name in a tracker. Raises Refusal if it cannot be the name of a checkpoint in its folder."""
    try:
        with open(tracker, encoding="utf-8") as file:
            text = file.read(1000).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{tracker} cannot be read ({one_line(error, 100)}): choose with --ckpt-step") from None
    if not text or not text.isprintable() or len(text) > 200:
        raise Refusal(f"{tracker} does not name a checkpoint: choose one with --ckpt-step")
    if Path(text).name != text or text == "..":
        raise Refusal(f"{tracker} says {text!r}, which is not in its folder: choose a checkpoint with --ckpt-step")
    return text


def _refuse_others(folder: Path) -> None:
    """Raise Refusal if a folder without a tracker is a checkpoint itself, or holds DeepSpeed's checkpoints."""
    if (folder / "metadata.json").exists() or any(folder.glob("mp_rank_*")):
        raise Refusal(f"{folder} is a checkpoint itself: give {folder.parent}, with --ckpt-step for one of several")
    if (folder / "latest_universal").exists():
        raise Refusal(f"{folder} holds a universal checkpoint of DeepSpeed's: add --universal-checkpoint")
    if (folder / "latest").exists():
        raise Refusal(
            f"{folder} holds checkpoints of DeepSpeed's own format: convert one to a universal checkpoint with "
            "DeepSpeed's ds_to_universal.py, and add --universal-checkpoint"
        )


def _refuse_zarr(path: Path) -> None:
    try:
        kind = parse_json(read_bytes(path / "metadata.json")).get("sharded_backend", "torch_dist")
    except (OSError, ValueError, AttributeError):
        return  # reported when the file is read
    if kind != "torch_dist":
        raise Refusal(
            f"checkpoint {path} is of Megatron-LM's format {kind}: load it in a Megatron-LM that supports it (core "
            "0.12 or before) and save it there with --ckpt-format torch_dist"
        )


@permitted()
def universal_path(folder: Path, step: int | None) -> Path | None:
    """DeepSpeed's universal checkpoint in ``folder``, the latest or of iteration ``step``; None if there is none.

    Raises:
        Refusal: there are only DeepSpeed's own checkpoints, or none of iteration ``step``.
    """
    name = folder / "latest_universal"
    path = folder / f"global_step{step}_universal" if step is not None else None
    if path is None and name.exists():
        path = folder / name_in(name)
    if path is not None and (path / "zero").is_dir():
        return path
    if path is not None or (folder / "latest").exists():
        raise Refusal(
            f"--universal-checkpoint: {path or name} does not exist: convert DeepSpeed's checkpoint with DeepSpeed's "
            "ds_to_universal.py"
        )
    return None


def is_hugging_face(path: Path) -> bool:
    """Whether a folder is a Hugging Face model, whatever the format of its weights."""
    return (path / "config.json").is_file()


def place_of_state(path: Path) -> tuple[str, int, int]:
    """The file in the checkpoint ``path`` that holds the common state, and its offset and length there in bytes.

    Raises:
        Refusal: ``.metadata`` cannot be read.
        OSError: there is no such file.
    """
    if not (path / COMMON).exists() and (path / METADATA).exists():
        for index, place in unpickle.read_metadata(file_in(path, METADATA)).storage_data.items():
            if index.fqn == STATE:
                return place.relative_path, place.offset, place.length
    return COMMON, 0, file_in(path, COMMON).stat().st_size


def files_of_state(path: Path) -> tuple[str, ...]:
    """The files that are read for the common state. Raises as :func:`place_of_state`."""
    name, *_ = place_of_state(path)
    return (COMMON,) if name == COMMON else (METADATA, name)


def common_state(path: Path) -> Any:
    """What was stored, unpickled safely. Raises Refusal if it cannot be read."""
    with refusing(f"{path / COMMON} cannot be read", OSError):
        name, offset, length = place_of_state(path)
    if name == COMMON:
        return unpickle.read(path / COMMON)
    with unpickle.parts_of(path / name) as read_part:
        data = read_part(offset, length)
    objects = unpickle.read_bytes(data, f"{path / name}: {STATE}")
    if not isinstance(objects, list) or len(objects) != 1:
        raise Refusal(f"{path / name}: {STATE} is not a checkpoint's state")
    return objects[0]
