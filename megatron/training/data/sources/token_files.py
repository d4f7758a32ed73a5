# SPDX-License-Identifier: Apache-2.0
"""Writes .bin/.idx files with checksums, and merges, splits and checks complete ones.

The manifest of PREFIX.bin and PREFIX.idx is PREFIX.json: documents, tokens, and the size and SHA-256 of both files.
"""

from __future__ import annotations

import array
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np

from megatron.training.data.index_files import HEADER, MAGIC, TOKEN_TYPES, DataFile, check_order, open_prefix
from megatron.training.data.sources.contents import digest_of
from megatron.training.json_file import read_json
from megatron.training.ownership.atomic import atomic_files
from megatron.training.refusal import Refusal, refusing

CODES = {np.dtype(kind): code for code, kind in TOKEN_TYPES.items()}
COPIED = 1 << 23  # bytes that are copied at a time
FORM = 1


class TokenWriter:
    """Writes documents to a .bin; :meth:`finish` writes its .idx and returns the entry of a manifest.

    Args:
        path: of the .bin, usually a temporary name.
        dtype: of the token ids.
    """

    def __init__(self, path: str, dtype: Any) -> None:
        self.dtype, self.lengths = np.dtype(dtype), array.array("i")
        self.file, self.hash = open(path, "wb"), hashlib.sha256()

    def add(self, tokens: np.ndarray, lengths: Iterable[int]) -> None:
        """Add documents, whose tokens follow each other. Raises OSError."""
        self.write(tokens.astype(self.dtype, copy=False).tobytes())
        self.lengths.extend(lengths)

    def write(self, data: bytes) -> None:
        """Add tokens in the dtype of the file; ``lengths`` must get those of their documents. Raises OSError."""
        self.file.write(data)
        self.hash.update(data)

    def close(self) -> None:
        """Close the .bin; a full disk was reported already."""
        with suppress(OSError):
            self.file.close()

    def finish(self, idx: str) -> dict[str, Any]:
        """Write the .idx to ``idx``. Raises OSError."""
        self.file.flush()
        size, lengths = self.file.tell(), np.frombuffer(self.lengths, np.int32)
        self.file.close()
        digest, idx_bytes = write_index(idx, self.dtype, lengths)
        return {
            "form": FORM, "documents": len(lengths), "tokens": size // self.dtype.itemsize, "dtype": self.dtype.name,
            "bin": {"bytes": size, "sha256": self.hash.hexdigest()},
            "idx": {"bytes": idx_bytes, "sha256": digest},
        }  # fmt: skip


def write_index(path: str, dtype: np.dtype, lengths: np.ndarray, block: int = 1 << 20) -> tuple[str, int]:
    """Write a .idx for documents of these lengths; returns its SHA-256 and its size in bytes."""
    digest, count = hashlib.sha256(), len(lengths)

    def parts() -> Iterator[bytes]:
        yield HEADER.pack(MAGIC, 1, CODES[dtype], count, count + 1)
        yield lengths.astype(np.int32, copy=False).tobytes()
        start = 0
        for first in range(0, count, block):
            ends = start + np.cumsum(lengths[first : first + block], dtype=np.int64) * dtype.itemsize
            yield np.concatenate([np.array([start], np.int64), ends[:-1]]).tobytes()
            start = int(ends[-1])
        for first in range(0, count + 1, block):
            yield np.arange(first, min(first + block, count + 1), dtype=np.int64).tobytes()

    with open(path, "wb") as file:
        for part in parts():
            file.write(part)
            digest.update(part)
        return digest.hexdigest(), file.tell()


def write_manifest(path: str, content: dict[str, Any]) -> None:
    """Write a manifest. Raises OSError."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=True)
        file.write("\n")


def read_manifest(path: str) -> dict[str, Any] | None:
    """The manifest of a file, with checked types; None if there is none.

    Raises:
        Refusal: it is not a manifest.
    """
    if not os.path.exists(path):
        return None
    content = read_json(path)
    try:
        numbers = [content["documents"], content["tokens"], *(content[end]["bytes"] for end in ("bin", "idx"))]
        texts = [content["dtype"], *(content[end]["sha256"] for end in ("bin", "idx"))]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError
        if not all(isinstance(text, str) for text in texts) or content["dtype"] not in {kind.name for kind in CODES}:
            raise TypeError
    except (KeyError, TypeError):
        raise Refusal(f"{path}: not a manifest of token files: remove it, and check the files without it") from None
    return content


def verify(prefix: str) -> list[str]:
    """Check that token files are complete and those of their manifest; returns the lines of a summary.

    Raises:
        Refusal: they are not.
    """
    manifest, lines = read_manifest(f"{prefix}.json"), []
    for end in ("bin", "idx") if manifest else ():
        _check_size(f"{prefix}.{end}", manifest[end]["bytes"])
    file = open_prefix(prefix, "verify")
    check_order(file, "verify")
    lengths = np.asarray(file.lengths())
    if manifest:
        if (len(lengths), int(lengths.sum(dtype=np.int64))) != (manifest["documents"], manifest["tokens"]):
            raise Refusal(f"{prefix}.idx does not have the documents and tokens of {prefix}.json: one was replaced")
        for end in ("bin", "idx"):
            if digest_of(f"{prefix}.{end}") != manifest[end]["sha256"]:
                raise Refusal(f"{prefix}.{end}: its SHA-256 is not that of {prefix}.json: it was changed or damaged")
        lines.append(f"both files have the SHA-256 of {prefix}.json")
    else:
        lines.append(f"{prefix}.json, a manifest with checksums, does not exist: only the structure was checked")
    return [f"{prefix}: complete, {len(lengths):,} documents, {int(lengths.sum(dtype=np.int64)):,} tokens", *lines]


def _check_size(path: str, expected: int) -> None:
    with refusing(path, OSError):
        actual = os.path.getsize(path)
    if actual != expected:
        raise Refusal(f"{path} has {actual:,} bytes, and its manifest says {expected:,}: make this file again")


def merge(
    prefixes: Sequence[str], output: str, overwrite: bool, extra: Sequence[str] = (),
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Write one pair of files, and its manifest, with the documents of several in order.

    Files with a manifest are compared with its checksums while they are copied.

    Args:
        extra: for each prefix, the name of a file of lines to append to OUTPUT.metadata.jsonl; empty for none.
        check: called when all is read, before the outputs get their names.

    Raises:
        Refusal: a file is damaged, or has another dtype; or the output cannot be written. Then nothing is written.
    """
    manifests = [read_manifest(f"{prefix}.json") for prefix in prefixes]
    for prefix, manifest in zip(prefixes, manifests):
        for end in ("bin", "idx") if manifest else ():
            _check_size(f"{prefix}.{end}", manifest[end]["bytes"])
        if manifest and (manifest["documents"] == 0) != (manifest["bin"]["bytes"] == 0):
            raise Refusal(f"{prefix}.json does not have the documents of {prefix}.bin: make this file again")
    filled = [(p, m, x) for p, m, x in zip(prefixes, manifests, extra or [""] * len(prefixes))
              if m is None or m["documents"]]  # fmt: skip
    if not filled:
        raise Refusal(f"{output}: no document in {len(prefixes)} parts")
    files: list[DataFile] = []
    for prefix, manifest, _ in filled:
        files.append(open_prefix(prefix, "--input"))
        check_order(files[-1], "--input")
        if manifest and digest_of(f"{prefix}.idx") != manifest["idx"]["sha256"]:
            raise Refusal(f"{prefix}.idx: its SHA-256 is not that of {prefix}.json: make this file again")
        if manifest and files[-1].sequences != manifest["documents"]:
            raise Refusal(f"{prefix}.json does not have the documents of {prefix}.idx: make this file again")
    kinds = {np.dtype(file.dtype).name for file in files}
    if len(kinds) > 1:
        raise Refusal(f"--input: files of {' and '.join(sorted(kinds))} tokens do not go into one: tokenize one again")
    names = [f"{output}.bin", f"{output}.idx", f"{output}.json", *([f"{output}.metadata.jsonl"] if extra else [])]
    with atomic_files(names, overwrite) as temporary:
        with closing(TokenWriter(temporary[0], files[0].dtype)) as writer:
            for file, (prefix, manifest, _) in zip(files, filled):
                digest = _copied(f"{prefix}.bin", writer.write)
                if manifest and digest != manifest["bin"]["sha256"]:
                    raise Refusal(f"{prefix}.bin: its SHA-256 is not that of {prefix}.json: make this file again")
                writer.lengths.frombytes(np.asarray(file.lengths()).tobytes())
            whole = writer.finish(temporary[1])
        for number, (prefix, manifest, lines) in enumerate(filled if extra else ()):
            with open(temporary[3], "ab" if number else "wb") as out:
                digest = _copied(lines, out.write)
            of_lines = (manifest or {}).get("metadata", {"sha256": digest})
            if not isinstance(of_lines, dict) or of_lines.get("sha256") != digest:
                raise Refusal(f"{lines}: its SHA-256 is not that of {prefix}.json: make this file again")
        write_manifest(temporary[2], whole)
        check()
    return whole


def _copied(path: str, write: Callable[[bytes], Any]) -> str:
    """Hand the content of a file to ``write``, part by part; returns its SHA-256."""
    digest = hashlib.sha256()
    for part in _content(path):
        write(part)
        digest.update(part)
    return digest.hexdigest()


def _content(path: str) -> Iterator[bytes]:
    with refusing(path, OSError):
        with open(path, "rb") as file:
            while part := file.read(COPIED):
                yield part


def write_documents(prefix: str, chosen: dict[str, np.ndarray], overwrite: bool) -> list[dict[str, Any]]:
    """Write documents of token files to other token files, all of these or none; returns their manifests.

    Args:
        chosen: for each prefix to write, the documents in their order.
    """
    file = open_prefix(prefix, "--input")
    reader, manifests = file.open(), []
    with atomic_files([f"{output}.{end}" for output in chosen for end in ("bin", "idx", "json")], overwrite) as names:
        for number, documents in enumerate(chosen.values()):
            for_bin, for_idx, for_manifest = names[3 * number : 3 * number + 3]
            with closing(TokenWriter(for_bin, file.dtype)) as writer:
                for document in documents.tolist():
                    ids = reader.get(document)
                    writer.add(ids, [len(ids)])
                manifests.append(writer.finish(for_idx))
            write_manifest(for_manifest, manifests[-1])
    return manifests


def same_documents(file: DataFile) -> tuple[np.ndarray, int]:
    """The first of every set of documents with equal tokens, ascending; and the tokens of the others.

    Documents are compared by BLAKE2b hashes of 16 bytes, of which all are held in memory.
    """
    reader, seen, kept, dropped = file.open(), set(), [], 0
    for document in range(file.sequences):
        ids = reader.get(document)
        key = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        if key in seen:
            dropped += len(ids)
        else:
            seen.add(key)
            kept.append(document)
    return np.array(kept, np.int64), dropped
