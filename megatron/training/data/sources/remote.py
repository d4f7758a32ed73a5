# SPDX-License-Identifier: Apache-2.0
"""Files behind a URL (``s3://``, ``gs://``, ``hf://``, ``memory://``), read by fsspec; other paths are local files."""

from __future__ import annotations

import glob
import io
import os
from collections.abc import Callable, Sequence
from typing import IO, Any, TypeVar

from megatron.training.refusal import Refusal, one_line

T = TypeVar("T")
BLOCK = 1 << 23  # bytes of a request
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}


def is_remote(path: str) -> bool:
    """Whether a path is a URL."""
    return "://" in path


def _file_system(path: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path within it."""
    protocol = path.split("://")[0]
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(path)
    except ImportError:
        package = PACKAGES.get(protocol, f"fsspec and its package for {protocol}")
        raise Refusal(f"{path}: needs the package {package}: pip install {package}") from None
    except ValueError as error:
        raise Refusal(f"{path}: {one_line(error, 200)}") from None


def _reading(action: Callable[[], T]) -> T:
    """Call ``action``; the libraries of object storage raise errors of many kinds, which become an OSError."""
    try:
        return action()
    except (OSError, Refusal, MemoryError):
        raise
    except Exception as error:
        raise OSError(one_line(error, 200)) from error


def _asked(path: str, method: str, **options: Any) -> Any:
    """What a method of its file system answers about a URL."""
    system, inner = _file_system(path)
    return _reading(lambda: getattr(system, method)(inner, **options))


class RemoteFile(io.RawIOBase):
    """A remote file whose errors are OSErrors."""

    def __init__(self, path: str) -> None:
        self.file = _asked(path, "open", mode="rb", block_size=BLOCK)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = _reading(lambda: self.file.read(len(buffer)))
        buffer[: len(part)] = part
        return len(part)

    def seek(self, offset: int, whence: int = 0) -> int:
        return _reading(lambda: self.file.seek(offset, whence))

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        if not self.closed:
            self.file.close()
        super().close()


def open_input(path: str) -> IO[bytes]:
    """A local or remote file. Raises OSError, or Refusal if the package for its protocol is not installed."""
    return io.BufferedReader(RemoteFile(path), 1 << 20) if is_remote(path) else open(path, "rb")


def size_of(path: str) -> int:
    """Bytes of a file; 0 for a pipe."""
    return int(_asked(path, "size") or 0) if is_remote(path) else os.path.getsize(path)


VERSIONS = ("ETag", "etag", "Content-MD5", "Digest", "xet_hash", "blob_id", "LastModified", "last_modified", "mtime",
            "updated", "created")  # fmt: skip


def properties(path: str) -> tuple[int, Any]:
    """(bytes, what changes when the file does) of a file; empty if its server gives no version. Raises OSError."""
    if not is_remote(path):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    _reading(_file_system(path)[0].invalidate_cache)
    info = _asked(path, "info")
    return int(info["size"]), next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def read_ranges(path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes | OSError]:
    """Bytes begin to end of a remote file for each range, by requests at the same time; an error in its place."""
    system, inner = _file_system(path)
    begins, ends = map(list, zip(*ranges))  # fsspec (spec.py, cat_ranges) takes other sequences for one number
    found = _reading(lambda: system.cat_ranges([inner] * len(ranges), begins, ends, on_error="return"))
    return [part if isinstance(part, bytes | OSError) else OSError(one_line(part, 200)) for part in found]


def is_folder(path: str) -> bool:
    """Whether a path is a local or a remote folder."""
    return bool(_asked(path, "isdir")) if is_remote(path) else os.path.isdir(path)


def exists(path: str) -> bool:
    """Whether a path is a local or a remote file or folder."""
    return bool(_asked(path, "exists")) if is_remote(path) else os.path.exists(path)


def matches(pattern: str) -> list[str]:
    """The files that a glob matches, in alphabetical order."""
    if not is_remote(pattern):
        return sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    system, inner = _file_system(pattern)
    if not any(char in inner for char in "*?["):
        return []
    found = _asked(pattern, "glob", detail=True)
    return [system.unstrip_protocol(name) for name, entry in sorted(found.items()) if entry.get("type") == "file"]
