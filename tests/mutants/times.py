# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that writes how long each test takes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_took: dict[str, float] = {}


def pytest_runtest_logreport(report: Any) -> None:
    _took[report.nodeid] = _took.get(report.nodeid, 0.0) + (report.duration if report.when == "call" else 0.0)


def pytest_sessionfinish() -> None:
    file = Path(os.environ["TIMES"])
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(known | _took))
