# SPDX-License-Identifier: Apache-2.0
"""The one error that settings end in."""

from __future__ import annotations


class Refusal(ValueError):
    """Settings that cannot run: one line that names the options and the way out. Entry points print it and exit 2."""

    everywhere = False  # whether every rank has raised it; then rank 0 tells it for all
