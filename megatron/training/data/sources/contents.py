# SPDX-License-Identifier: Apache-2.0
"""What files contain, as values that change when they do: work is continued only with the same data."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from megatron.training.data.sources.remote import is_remote, open_input, properties
from megatron.training.json_file import PART
from megatron.training.ownership.atomic import SAMPLE, SAMPLES, sample_of


def digest_of(path: str) -> str:
    """The SHA-256 of a local or a remote file. Raises OSError."""
    digest = hashlib.sha256()
    with open_input(path) as file:
        while part := file.read(PART):
            digest.update(part)
    return digest.hexdigest()


def content_of(path: str) -> list[Any]:
    """What changes when a file does, or any file in a folder.

    A short file is read; of a long one, 16 parts are, and the time of its last change counts. A remote file has a
    version, which is empty if its server gives none. A pipe has no content yet.

    Raises:
        OSError: it cannot be read.
    """
    if is_remote(path):
        return list(properties(path))
    if os.path.isdir(path):
        files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        return [[os.path.relpath(file, path), *content_of(file)] for file in sorted(files) if os.path.isfile(file)]
    status = os.stat(path)
    if not os.path.isfile(path):
        return []
    times = [status.st_mtime_ns] if status.st_size > SAMPLE * SAMPLES else []
    return [status.st_size, sample_of(path), *times]
