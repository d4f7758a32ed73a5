# SPDX-License-Identifier: Apache-2.0
"""A JSON file that a user gives: of a machine, of prices, of failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.training.refusal import Refusal


def read_json(path: Path, flag: str = "") -> Any:
    """What the file holds.

    Args:
        flag: that named the file, for messages.

    Raises:
        Refusal: it cannot be read, or is not JSON.
    """
    where = f"{flag} {path}" if flag else f"{path}"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"{where}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{where}: not JSON: {error}") from None
