# SPDX-License-Identifier: Apache-2.0
"""Which run a job goes on with, and whether it may save where it is told to.

A run has an identity, which its checkpoints keep. A job goes on with the run of the checkpoint that it loads, or begins
a new one. It may save in a folder that holds checkpoints only if these are of its run and not newer than its start;
otherwise the folder would become a mixture of two runs, or lose what one of them has saved. Going back in a folder, by
``--ckpt-step``, begins a new run: checkpoints of the one that is left are overwritten when the new one reaches them.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from megatron.training.arguments.config import CheckpointConfig
from megatron.training.checkpoint.megatron_lm.places import checkpoints_in, iteration_of, run_of
from megatron.training.refusal import Refusal, reason

COPIES = "copies_in_memory.txt"  # in --save: the run whose copies in memory belong to it
ANEW = (("finetune", "--finetune"), ("reset_iteration", "--reset-iteration"))


def identity(found: Path | None, settings: CheckpointConfig, notes: list[str], *, saves: bool = True) -> str:
    """Identity of the run that a job with the checkpoint ``found`` goes on with, or begins: 32 hexadecimal digits.

    Args:
        found: what is loaded, None where the job starts without a checkpoint.
        notes: where a line goes about checkpoints that will be overwritten.
        saves: whether the job saves in ``--save``.

    Raises:
        Refusal: ``--save`` holds checkpoints of another run, or newer ones.
    """
    start = iteration_of(found)
    if settings.finetune or settings.reset_iteration or _pretrained(found, settings):
        start = 0
    goes_on = start > 0
    run = (run_of(found) or "") if goes_on else ""
    if not run and settings.non_persistent_save_interval is not None:
        run = run_of_copies(settings.save)  # of a run that has no checkpoint yet, or a damaged one
    there = checkpoints_in(Path(settings.save)) if settings.save and saves else {}
    newest = max(there, default=0)
    here = bool(there) and goes_on and _same(found.parent, settings.save)
    if there and not here and not (goes_on and run and newest <= start and run_of(there[newest]) == run):
        raise Refusal(_other_run(settings, newest))
    if here and newest > start:
        notes.append(
            f"newer checkpoints in {settings.save}, up to iteration {newest}, are not of the run that goes on from "
            f"iteration {start}: each is overwritten when this run comes to it"
        )
    if goes_on and settings.ckpt_step is not None and max(checkpoints_in(found.parent)) > start:
        if here:
            (Path(settings.save) / COPIES).unlink(missing_ok=True)  # they are of the run that is left
        return uuid.uuid4().hex
    return run or uuid.uuid4().hex


def _other_run(settings: CheckpointConfig, newest: int) -> str:
    flags = [flag for name, flag in ANEW if getattr(settings, name)]
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
        f"continue from there, and could overwrite: go on with that run by {go_on}, give another folder to --save, or "
        "remove this one"
    )


def _pretrained(found: Path | None, settings: CheckpointConfig) -> bool:
    """Whether the checkpoint is that of --pretrained-checkpoint."""
    first = settings.pretrained_checkpoint
    return found is not None and first is not None and Path(first) == found.parent


def _same(folder: Path, other: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(other)


def run_of_copies(save: str) -> str:
    """The run whose copies in memory belong to this folder; empty where there are none. Raises Refusal."""
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
