#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare the files of a checkpoint with their checksums without loading it, for example after copying it.

    python tools/check_checkpoint.py checkpoints                       # the latest; --ckpt-step N for another one
    python tools/check_checkpoint.py checkpoints/iter_0000100          # or a checkpoint's folder itself
    python tools/check_checkpoint.py Llama-3.1-8B                      # or a Hugging Face folder

--write-list writes checksums.json for the files as they are now. Use it for a folder that was changed or renamed on
purpose, or has lost its list; earlier damage can then no longer be detected.
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import tools.interrupts  # noqa: F401

# isort: split
import argparse
from pathlib import Path

from megatron.training.refusal import Refusal
from tools.convert_command import exit_on_signals, run
from tools.option_parser import RefusingParser


def check(argv: list[str] | None) -> list[str]:
    """Check or list the files; returns lines to print. Raises Refusal."""
    args = build_parser().parse_args(argv)
    from megatron.training.checkpoint import checksums
    from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS
    from megatron.training.disk import sync_file, sync_folder

    path = path_of(args.folder, args.ckpt_step)
    if args.write_list:
        try:
            listed = checksums.list_files(path)
            sync_file(path / CHECKSUMS)
            sync_folder(path)
        except OSError as error:
            raise Refusal(f"{error.filename or path}: {error.strerror or error}") from None
        return [f"{path / CHECKSUMS}: {len(listed.files)} files as they are now"]
    notes: list[str] = []
    checked = checksums.check(path, notes)
    return notes or [f"{path}: {len(checked.files)} files are as they were written"]


def path_of(folder: Path, step: int | None) -> Path:
    """The checkpoint in ``folder``, or ``folder`` itself. Raises Refusal if there is none."""
    from megatron.training.checkpoint.megatron_lm.checked import TORCH_FILES
    from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS
    from megatron.training.checkpoint.megatron_lm.places import TRACKER, checkpoint_path

    marks = ("common.pt", ".metadata", CHECKSUMS, *TORCH_FILES)
    if not (folder / TRACKER).exists() and any(True for mark in marks for _ in folder.glob(mark)):
        return folder.absolute()  # "." has no name
    path = checkpoint_path(folder, step)
    if path is None:
        raise Refusal(f"{folder} holds no checkpoint: give a folder of --save, or of one checkpoint")
    return path


def build_parser() -> argparse.ArgumentParser:
    parser = RefusingParser(__doc__)
    parser.add_argument("folder", type=Path, help="a folder for --load, or the folder of one checkpoint")
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="iteration to check (default: the latest)")
    parser.add_argument("--write-list", action="store_true", help="write checksums.json for the files as they are now")
    return parser


def main(argv: list[str] | None = None) -> int:
    return run(check, argv)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
