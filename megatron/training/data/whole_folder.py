# SPDX-License-Identifier: Apache-2.0
"""A folder of a cache that appears whole or not at all: an interrupted run leaves no broken one behind."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.platform.disk import sync_tree


@contextmanager
def whole_folder(folder: str) -> Iterator[str]:
    """Yields a folder beside ``folder`` to fill, which takes that name when all went well, and goes otherwise.

    Raises:
        OSError: nothing can be written there; or ``folder`` is there, because another run was faster.
    """
    temporary = f"{folder}.{uuid.uuid4().hex}.tmp"  # two containers may agree in host name and process number
    try:
        os.makedirs(temporary)
        yield temporary
        sync_tree(temporary)  # after a power cut, what has the name must be whole
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
