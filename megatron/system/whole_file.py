# SPDX-License-Identifier: Apache-2.0
"""Small results: files that get their names when they are complete."""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """Yields a file that takes the place of ``path`` at the end; after an error, ``path`` stays as it was.

    A link stays one, and something else than a file, such as /dev/stdout, is written to. Of several jobs, the last one
    wins.

    Raises:
        OSError: the file cannot be written; it names ``path``.
    """
    real = os.path.realpath(path)
    temporary = real if is_special(real) else f"{real}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
        if temporary != real:
            os.replace(temporary, real)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        if temporary != real:
            with suppress(OSError):
                os.unlink(temporary)


def replace_file(path: str | Path, data: str | bytes) -> None:
    """Write a file completely or not at all, as :func:`whole_file`."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def save_figure(figure: Any, path: str | Path, **options: Any) -> None:
    """Write a figure of matplotlib completely or not at all, in the format that the name ends in, or as PNG.

    Raises:
        OSError: the file cannot be written. ValueError: matplotlib does not know the format.
    """
    figure.savefig(drawn := io.BytesIO(), format=os.path.splitext(path)[1][1:] or "png", **options)
    replace_file(path, drawn.getvalue())


def is_special(path: str | Path) -> bool:
    """Whether the path is a terminal, a pipe or the like, of which there is one for all jobs."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
