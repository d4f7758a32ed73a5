# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a folder is meant: the same names as in Megatron-LM."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.training.refusal import Refusal, one_line, permitted

TRACKER = "latest_checkpointed_iteration.txt"
OTHER_FORMS = (
    ("mp_rank_*", "of Megatron-LM's older format torch"),
    ("*mp_rank_*_model_states.pt", "of DeepSpeed's"),
    ("zero", "a universal one of DeepSpeed's"),
)


@permitted()
def checkpoint_path(folder: Path, step: int | None, *, whole: bool = True) -> Path | None:
    """The checkpoint of iteration ``step``, or the latest; None where there is none and none was asked for.

    A Hugging Face folder is a checkpoint itself.

    Args:
        whole: refuse one that is not there, or not whole; otherwise only its name is told.

    Raises:
        Refusal: it is not there, not whole, or of a format that is not loaded.
    """
    tracker = folder / TRACKER
    if step is None:
        if not tracker.exists():
            return folder if is_hugging_face(folder) else _refuse_others(folder)
        text = name_in(tracker)
        name = f"iter_{int(text):07d}" if text.isdecimal() else text
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


def name_in(tracker: Path) -> str:
    """What a file says that names the latest checkpoint. Raises Refusal where that can be no name."""
    try:
        text = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{tracker} cannot be read ({one_line(error, 100)}): choose with --ckpt-step") from None
    if not text or not text.isprintable():
        raise Refusal(f"{tracker} does not name a checkpoint: choose one with --ckpt-step")
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
        kind = json.loads((path / "metadata.json").read_text()).get("sharded_backend", "torch_dist")
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
