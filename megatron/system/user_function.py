# SPDX-License-Identifier: Apache-2.0
"""A function in a file of the user, named FILE.py:NAME. Its file is run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path


def user_function(subject: str, spec: str) -> Callable:
    """The function that ``spec``, FILE.py:NAME, names in a file of the user.

    Args:
        subject: the flag that names it, for messages.

    Raises:
        ValueError: there is no such function, or the file cannot be run.
    """
    path, _, name = spec.rpartition(":")
    if not path or not name:
        raise ValueError(f"{subject}: give a file and a function in it, FILE.py:NAME")
    if not Path(path).is_file():
        raise ValueError(f"{subject}: there is no file {path}; give FILE.py:NAME")
    module_spec = importlib.util.spec_from_file_location("function_of_the_user", path)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"{subject}: {path} is not a Python file; give FILE.py:NAME")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise any exception
        raise ValueError(f"{subject}: {path} cannot be run: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{subject}: {path} has no function {name}; give FILE.py:NAME")
    return getattr(module, name)
