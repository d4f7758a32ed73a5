# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a folder is meant: the same names as in Megatron-LM.

A file in the folder names the latest. It is moved on after a checkpoint has its name, so a kill between the two leaves
one newer checkpoint than it says. Whatever else does not fit together is refused, with a way out: a start from an older
state, or from none, would overwrite what is there.
"""

from __future__ import annotations

from pathlib import Path

from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.refusal import Refusal, one_line, permitted

TRACKER = "latest_checkpointed_iteration.txt"
OTHER_FORMS = (
    ("mp_rank_*", "of Megatron-LM's older format torch"),
    ("*mp_rank_*_model_states.pt", "of DeepSpeed's"),
    ("zero", "a universal one of DeepSpeed's"),
)


@permitted()
def checkpoint_path(
    folder: Path, step: int | None, *, whole: bool = True, notes: list[str] | None = None
) -> Path | None:
    """The checkpoint of iteration ``step``, or the latest; None where there is none and none was asked for.

    A Hugging Face folder is a checkpoint itself.

    Args:
        whole: refuse one that is not there, or not whole; otherwise only its name is told.
        notes: where a line goes if the latest is not the one that the folder's tracker names.

    Raises:
        Refusal: it is not there, not whole, or of a format that is not loaded; or it is not clear which is the latest.
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
                f"checkpoint {path} is {kind}: python tools/convert_checkpoint.py --from {folder} --to DIR makes one "
                "that --load DIR --finetune takes"
            )
    if (path / ".metadata").exists() and not (path / "common.pt").exists():
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
    """Name of the checkpoint to go on from; None where there is neither a tracker nor a checkpoint."""
    tracker, listed = folder / TRACKER, checkpoints_in(folder)  # first the list: a job may be saving there now
    if not tracker.exists():
        if not listed:
            return None
        newest = max(listed)
        if len(listed) > 1 or run_of(listed[newest]) is None:
            raise Refusal(
                f"{folder} holds checkpoints up to iteration {newest}, and no {TRACKER}, which names the latest: write "
                f"{newest} to it, or choose with --ckpt-step"
            )
        notes.append(f"{tracker} is missing, as after a kill: going on from {listed[newest]}, the only one there")
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
            f"the file was moved on: going on from {max(newer)}; --ckpt-step {named} goes back"
        )
    return f"iter_{max(newer, default=named):07d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """What look like checkpoints, by iteration, the oldest first."""
    found = {}
    for path in folder.glob("iter_[0-9]*"):
        number = path.name.removeprefix("iter_")
        if number.isascii() and number.isdecimal() and len(number) < 16 and path.is_dir():  # not iter_0000010.bak
            found[int(number)] = path
    return dict(sorted(found.items()))


def iteration_of(path: Path | None) -> int:
    """Of a checkpoint, by its name; 0 where there is none, or it has another name."""
    number = path.name.removeprefix("iter_") if path else ""
    return int(number) if number.isdigit() else 0


def run_of(path: Path) -> str | None:
    """The identity of the run that a checkpoint belongs to; empty if its program gave it none.

    None where that cannot be told: it is not whole, of another form, or lies there under another iteration's name.
    """
    if not (path / "metadata.json").exists():
        return None
    try:
        common = unpickle.read(path / "common.pt")
        progress = common.get("progress", common)  # Megatron-LM's says its iteration at the top
        return str(progress.get("run", "")) if int(progress["iteration"]) == iteration_of(path) else None
    except (Refusal, OSError, AttributeError, KeyError, TypeError, ValueError):
        return None


def name_in(tracker: Path) -> str:
    """What a file says that names the latest checkpoint. Raises Refusal where that can be no name in its folder."""
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
    """A folder without a tracker holds no checkpoint; but it may be one itself, or DeepSpeed's.

    Raises:
        Refusal: it is.
    """
    if (folder / "metadata.json").exists() or any(folder.glob("mp_rank_*")):
        raise Refusal(f"{folder} is a checkpoint itself: give {folder.parent}, with --ckpt-step for one of several")
    if (folder / "latest_universal").exists():
        raise Refusal(f"{folder} holds a universal checkpoint of DeepSpeed's: add --universal-checkpoint")
    if (folder / "latest").exists():
        raise Refusal(
            f"{folder} holds checkpoints of DeepSpeed's own form: make a universal one with DeepSpeed's "
            "ds_to_universal.py, and add --universal-checkpoint"
        )


def _refuse_zarr(path: Path) -> None:
    try:
        kind = parse_json(read_bytes(path / "metadata.json")).get("sharded_backend", "torch_dist")
    except (OSError, ValueError, AttributeError):
        return  # said by who reads it
    if kind != "torch_dist":
        raise Refusal(
            f"checkpoint {path} is of Megatron-LM's format {kind}: load it in a Megatron-LM that reads it (core 0.12 "
            "or before) and save it there with --ckpt-format torch_dist"
        )


@permitted()
def universal_path(folder: Path, step: int | None) -> Path | None:
    """The universal checkpoint of DeepSpeed's in ``folder``, the latest or of iteration ``step``; None: there is none.

    Raises:
        Refusal: there are checkpoints of DeepSpeed's, and none of them universal.
    """
    name = folder / "latest_universal"
    path = folder / f"global_step{step}_universal" if step is not None else None
    if path is None and name.exists():
        path = folder / name_in(name)
    if path is not None and (path / "zero").is_dir():
        return path
    if path is not None or (folder / "latest").exists():
        raise Refusal(
            f"--universal-checkpoint: {path or name} is not there: make it of DeepSpeed's checkpoint with DeepSpeed's "
            "ds_to_universal.py"
        )
    return None


def is_hugging_face(path: Path) -> bool:
    """Whether a folder is a model of Hugging Face's, whatever its weights are in."""
    return (path / "config.json").is_file()
