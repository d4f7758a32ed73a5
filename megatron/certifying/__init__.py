# SPDX-License-Identifier: Apache-2.0
"""Checks that a parallel program computes what one process computes: losses, gradients, clipping norm and update.

The program is any function; it need not use this library. A difference is traced to the first module that shows it.
The limits follow from rounding: the program runs several times on one process with every result changed by its last bit
(:mod:`rounding`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.certifying.certificate import Certificate, certify
    from megatron.certifying.in_tests import same_as_one_process
    from megatron.certifying.recording import Outcome

__all__ = ["Certificate", "Outcome", "certify", "same_as_one_process"]
HOMES = dict(zip(__all__, ("certificate", "recording", "certificate", "in_tests")))


def __getattr__(name: str) -> Any:
    """Public names, imported when they are used: pytest loads the plugin in every session, and torch takes seconds."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
