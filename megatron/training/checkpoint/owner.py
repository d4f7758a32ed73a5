# SPDX-License-Identifier: Apache-2.0
"""The lock of a save folder: of all jobs with the same ``--save``, at most one writes there.

A run has an identity, which is stored in its checkpoints. A job continues the run of the checkpoint that it loads, or
begins a new one. It may save in a folder with checkpoints only if these belong to its run and are not newer than its
start; otherwise the folder would mix two runs, or one would overwrite the other. Going back in a folder with
``--ckpt-step`` begins a new run, which overwrites the abandoned run's checkpoints when it reaches their iterations.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import torch.distributed as dist

from megatron.training.checkpoint.checkpoint_folder import check_writable
from megatron.training.checkpoint.megatron_lm.places import checkpoints_in, iteration_of, run_of
from megatron.training.ownership.lock_file import Owner, acquire
from megatron.training.refusal import Refusal, reason, refuse_together
from megatron.training.settings.config import CheckpointConfig

COPIES = "copies_in_memory.txt"  # in --save: the identity of the run whose copies in memory belong to this folder
NEW_RUN_FLAGS = (("finetune", "--finetune"), ("reset_iteration", "--reset-iteration"))


def identity(loaded: Path | None, settings: CheckpointConfig, notes: list[str], *, saves: bool = True) -> str:
    """Identity of the run that a job continues or begins: 32 hexadecimal digits.

    Args:
        loaded: the checkpoint that is loaded; None if the job starts without one.
        notes: receives a line about checkpoints that will be overwritten.
        saves: whether the job saves in ``--save``.

    Raises:
        Refusal: ``--save`` holds checkpoints of another run, or newer ones.
    """
    start = iteration_of(loaded)
    if settings.finetune or settings.reset_iteration or is_pretrained(loaded, settings):
        start = 0
    resumes = start > 0
    run = (run_of(loaded) or "") if resumes else ""
    if not run and settings.non_persistent_save_interval is not None:
        run = run_of_copies(settings.save)  # of a run whose checkpoint is damaged or not written yet
    saved = checkpoints_in(Path(settings.save)) if settings.save and saves else {}
    newest = max(saved, default=0)
    same_folder = bool(saved) and resumes and _same(loaded.parent, settings.save)
    if saved and not same_folder and not (resumes and run and newest <= start and run_of(saved[newest]) == run):
        raise Refusal(_other_run(settings, newest))
    if same_folder and newest > start:
        notes.append(
            f"newer checkpoints in {settings.save}, up to iteration {newest}, belong to another run than this one from "
            f"iteration {start}: each is overwritten when this run reaches its iteration"
        )
    if resumes and settings.ckpt_step is not None and max(checkpoints_in(loaded.parent)) > start:
        if same_folder:
            (Path(settings.save) / COPIES).unlink(missing_ok=True)  # the copies belong to the abandoned run
        return uuid.uuid4().hex
    return run or uuid.uuid4().hex


def _other_run(settings: CheckpointConfig, newest: int) -> str:
    flags = [flag for name, flag in NEW_RUN_FLAGS if getattr(settings, name)]
    if settings.universal_checkpoint:
        flags.append("--universal-checkpoint")
    without = f" without {' and '.join(flags)}" if flags else ""
    if settings.load and settings.ckpt_step is not None:
        without += f"{' and' if flags else ' without'} --ckpt-step"
    go_on = f"--load {settings.save}{without}"
    if settings.load and _same(Path(settings.load), settings.save) and not without:
        go_on += f" and --ckpt-step {newest}"
    return (
        f"--save {settings.save} holds checkpoints up to iteration {newest}, of a run that this job does not "
        f"continue from there and could overwrite: continue that run with {go_on}, give another folder to --save, or "
        "remove this one"
    )


def is_pretrained(path: Path | None, settings: CheckpointConfig) -> bool:
    """Whether ``path`` is the checkpoint that --pretrained-checkpoint gives."""
    folder = settings.pretrained_checkpoint
    return path is not None and folder is not None and Path(folder) == path.parent


def _same(folder: Path, other: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def run_of_copies(save: str) -> str:
    """Identity of the run whose copies in memory belong to this folder; empty if there are none. Raises Refusal."""
    path = Path(save) / COPIES
    try:
        run = path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} cannot be read ({reason(error)}): remove it") from None
    if run and not (len(run) == 32 and run.isalnum()):
        raise Refusal(f"{path} is not what was written: remove it")
    return run


def claim_folder(folder: str, notes: list[str]) -> Owner:
    """Take the save folder for this job, and create it if necessary. All ranks call it.

    Args:
        notes: receives a line about a job from which the folder was taken over.

    Raises:
        Refusal: on every rank; another job has the folder, or it cannot be written to.
    """
    first = dist.get_rank() == 0

    def take_it() -> Owner | None:
        if not first:
            return None
        check_writable(folder)
        acquire(taken := Owner(Path(folder), uuid.uuid4().hex), notes)
        return taken

    owner = refuse_together(take_it)
    token = [owner.token if owner else ""]
    dist.broadcast_object_list(token)
    return owner or Owner(Path(folder), token[0])
