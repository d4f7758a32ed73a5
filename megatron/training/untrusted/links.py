# SPDX-License-Identifier: Apache-2.0
"""Links in folders from elsewhere: one that leads out of its folder is refused, because it may name a private file.

Its contents would be read as a model's, or copied into a folder that is published. In the Hugging Face Hub's cache,
``snapshots/REVISION/FILE`` is a link to ``blobs/HASH`` next to ``snapshots``, which is permitted.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megatron.training.refusal import Refusal


def file_in(folder: Path, name: str) -> Path:
    """``folder / name``.

    Raises:
        Refusal: it is a link that leads out of the folder, or something else than a file, such as a pipe.
        OSError: there is no such file.
    """
    path, root, real = folder / name, Path(os.path.realpath(folder)), Path(os.path.realpath(folder / name))
    if not real.is_relative_to(root) and not _in_hub_cache(root, real):
        raise Refusal(
            f"{path} is a link that leads out of its folder, to {real}: put the file itself there, or remove the link"
        )
    if not stat.S_ISREG(path.stat().st_mode):
        raise Refusal(f"{path} is not a regular file: remove it")
    return path


def _in_hub_cache(folder: Path, real: Path) -> bool:
    """Whether ``real`` is a blob of the Hub's cache, and ``folder`` a snapshot of the same model."""
    models = [above.parent.parent for above in (folder, *folder.parents) if above.parent.name == "snapshots"]
    return any(real.parent == model / "blobs" for model in models)


def check_files_in(folder: Path) -> None:
    """Refuse links directly in ``folder`` that lead out of it. Raises Refusal or OSError."""
    for entry in os.scandir(folder):
        if entry.is_symlink() and os.path.isfile(entry.path):
            file_in(folder, entry.name)
