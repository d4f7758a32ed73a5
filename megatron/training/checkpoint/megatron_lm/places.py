# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a folder is meant: the same names as in Megatron-LM."""

from __future__ import annotations

from pathlib import Path

from megatron.training.refusal import Refusal

TRACKER = "latest_checkpointed_iteration.txt"
OTHER_FORMS = (
    ("mp_rank_*", "of Megatron-LM's older format torch"),
    ("*mp_rank_*_model_states.pt", "of DeepSpeed's"),
    ("zero", "a universal one of DeepSpeed's"),
)


def checkpoint_path(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of iteration ``step``, or the latest; None where there is none and none was asked for.

    A Hugging Face folder is a checkpoint itself.

    Raises:
        Refusal: it is not there, not whole, or of a format that is not loaded.
    """
    tracker = folder / TRACKER
    if step is None:
        if not tracker.exists():
            return folder if is_hugging_face(folder) else None
        text = tracker.read_text().strip()
        name = f"iter_{int(text):07d}" if text.isdigit() else text
    else:
        name = f"iter_{step:07d}"
    path = folder / name
    if (path / "metadata.json").exists():
        return path
    for pattern, kind in OTHER_FORMS:
        if path.is_dir() and any(path.glob(pattern)):
            raise Refusal(
                f"checkpoint {path} is {kind}: python tools/convert_checkpoint.py --from {folder} --to DIR makes one "
                "that --load DIR --finetune takes"
            )
    if (path / ".metadata").exists() and not (path / "common.pt").exists():
        raise Refusal(
            f"checkpoint {path} is of Megatron-LM's format torch_dcp or fsdp_dtensor: save it there with "
            "--ckpt-format torch_dist"
        )
    raise Refusal(f"checkpoint {path} is missing or incomplete: choose another one with --ckpt-step")


def is_hugging_face(path: Path) -> bool:
    """Whether a folder is a model of Hugging Face's, whatever its weights are in."""
    return (path / "config.json").is_file()
