# SPDX-License-Identifier: Apache-2.0
"""Values that several tests need and that are made once, also if tests run in several processes."""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Shared:
    """Values by key that are made once per run of pytest and kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Any] = {}
        folder.mkdir(exist_ok=True)

    def __call__(self, key: object, make: Callable[[], Any]) -> Any:
        """The value of ``make()`` from the first process that needs it; others wait for it.

        Args:
            key: its ``repr`` identifies the value.
            make: returns something that can be pickled. If it raises, the next process that needs it tries again.
        """
        name = hashlib.sha256(repr(key).encode()).hexdigest()
        if name not in self._known:
            file = self._folder / name
            with open(file.with_suffix(".lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it even if this process is killed
                if not file.exists():
                    value = pickle.dumps(make())
                    file.with_suffix(".part").write_bytes(value)
                    file.with_suffix(".part").rename(file)
            self._known[name] = pickle.loads(file.read_bytes())
        return self._known[name]
