# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a program of this folder ends it with one line, also while it imports; a program imports this first."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def _one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):  # Python then ends by the signal: 130 for a shell
        print(f"{os.path.basename(sys.argv[0])}: interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


_program = getattr(sys.modules["__main__"], "__file__", None) or ""
if os.path.dirname(os.path.abspath(_program)) == os.path.dirname(os.path.abspath(__file__)):
    sys.excepthook = _one_line
