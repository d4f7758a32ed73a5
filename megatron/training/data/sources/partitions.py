# SPDX-License-Identifier: Apache-2.0
"""From text to token files, in one piece or in parts that several processes or machines make.

The input is a range of bytes, and each part has an equal share of it: the records that begin in its share. So the parts
together have all records in order, and what they are merged into does not depend on their number, nor on who makes
them. A part is complete if its manifest exists, which is written last. After an interruption only the other parts are
made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from megatron.training.data.encoding import Encoded, Settings, encode_all
from megatron.training.data.sources.contents import content_of, digest_of
from megatron.training.data.sources.token_files import TokenWriter, merge, read_manifest, write_manifest
from megatron.training.data.text_files import ALL, Reader, no_memory
from megatron.training.json_file import read_json
from megatron.training.ownership.atomic import atomic_files
from megatron.training.ownership.lock_file import InUse, Owner
from megatron.training.ownership.own_files import one_job, remove_left, remove_listed
from megatron.training.refusal import Refusal, reason, some

PART_BYTES = 1 << 26  # of the input for each part, where their number is not given
METHOD = "fork" if sys.platform == "linux" else "spawn"
MOST_PARTS = 100_000
MOST_LINES = 3  # messages of bad records that are kept


@dataclass(frozen=True)
class Work:
    """What is read, and how it is encoded."""

    paths: tuple[str, ...]
    settings: Settings
    skip_bad: bool


@dataclass
class Totals:
    """Counts of what was read and written."""

    documents: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0
    empty: int = 0
    filtered: int = 0
    bad: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, encoded: Encoded) -> None:
        """Count encoded records."""
        documents = {key: len(lengths) for key, lengths in encoded.lengths.items()}
        tokens = {key: ids.size for key, ids in encoded.tokens.items()}
        counts = (encoded.text_bytes, encoded.empty, encoded.filtered, len(encoded.bad))
        self.include(Totals(documents, tokens, *counts, encoded.bad))

    def include(self, other: Totals) -> None:
        """Add the counts of a part."""
        for mine, theirs in ((self.documents, other.documents), (self.tokens, other.tokens)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        for name in ("text_bytes", "empty", "filtered", "bad"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.messages = [*self.messages, *other.messages][:MOST_LINES]


Report = Callable[[Totals, int], None]


def write_tokens(
    work: Work,
    prefix: str,
    reader: Reader,
    workers: int,
    overwrite: bool,
    *,
    manifest: str | None = None,
    owner: Owner | None = None,
    method: str = METHOD,
    report: Report = lambda totals, position: None,
) -> Totals:
    """Encode what a reader reads, and write PREFIX_KEY_document.bin and .idx for each key, all or none.

    Args:
        manifest: a file for the manifests of all keys, the counts, and the work. Without one, no key may be empty.
        owner: the lock of these files, if this job has it already.
        report: called after each batch with the counts so far and the number of bytes read.

    Raises:
        Refusal: a record is bad and ``work.skip_bad`` is not set, or a file cannot be read or written.
    """
    settings, totals = work.settings, Totals()
    prefixes = [f"{prefix}_{key}_document" for key in settings.keys]
    endings = ["bin", "idx", *(["metadata.jsonl"] if settings.metadata is not None else [])]
    if manifest:
        endings.append("json")
    paths = [f"{one}.{end}" for one in prefixes for end in endings]
    with atomic_files(paths, overwrite, owner) as temporary, ExitStack() as stack:
        names = {key: dict(zip(endings, temporary[i * len(endings) :])) for i, key in enumerate(settings.keys)}
        writers = {key: TokenWriter(names[key]["bin"], settings.dtype) for key in settings.keys}
        for writer in writers.values():
            stack.callback(writer.close)
        lines = {}
        if settings.metadata is not None:
            lines = {key: open(names[key]["metadata.jsonl"], "w", encoding="utf-8") for key in settings.keys}
            for file in lines.values():
                stack.callback(_close, file)
        encoded_batches = encode_all(settings, reader, workers, method)
        stack.callback(encoded_batches.close)
        for encoded, position in encoded_batches:
            if encoded.bad and not work.skip_bad:
                raise Refusal(f"{encoded.bad[0]}; give --skip-bad-lines to count such lines and go on")
            for key, writer in writers.items():
                writer.add(encoded.tokens[key], encoded.lengths[key])
            for key, file in lines.items():
                file.writelines(f"{line}\n" for line in encoded.metadata[key])
            totals.add(encoded)
            report(totals, position)
        for key in () if manifest else settings.keys:
            if not totals.documents.get(key):
                raise Refusal(f'--input: no document with text under the key "{key}"')
        for file in lines.values():
            file.close()
        for key, writer in writers.items():
            entry = writer.finish(names[key]["idx"])
            if manifest:
                of_lines = {"metadata": {"sha256": digest_of(names[key]["metadata.jsonl"])}} if lines else {}
                write_manifest(names[key]["json"], entry | of_lines)
    return totals


def _close(file: Any) -> None:
    with suppress(OSError):
        file.close()


MANIFEST = re.compile(r"\d{5,6}-of-\d{5,6}\.json")  # the name of a part's manifest


@dataclass(frozen=True)
class Parts:
    """A division of the work into parts, in the folder PREFIX.parts."""

    work: Work
    prefix: str
    count: int
    identity: str  # of the input and the settings
    sizes: tuple[int, ...]  # of the files of the input
    contents: tuple[list[Any], ...]  # of the files of the input
    overwrite: bool  # whether parts of other work are made again

    @property
    def folder(self) -> str:
        """Where the parts are."""
        return f"{self.prefix}.parts"

    def name(self, part: int) -> str:
        """The prefix of a part's files."""
        return os.path.join(self.folder, f"{part:05}-of-{self.count:05}")

    def done(self, part: int) -> Totals | None:
        """The counts of a complete part; None if it must be made.

        Raises:
            Refusal: the part has other inputs or settings.
        """
        path = f"{self.name(part)}.json"
        if not os.path.exists(path):
            return None
        content = read_json(path)
        if not isinstance(content, dict) or not _is_part(content) or content["identity"] != self.identity:
            if self.overwrite:
                return None
            raise Refusal(
                f"{path}: made of other inputs, or with other settings: remove {self.folder}, or give --overwrite"
            )
        for key in self.work.settings.keys:
            prefix = f"{self.name(part)}_{key}_document"
            entry = read_manifest(f"{prefix}.json")
            if entry is None or any(_size(f"{prefix}.{end}") != entry[end]["bytes"] for end in ("bin", "idx")):
                return None
        return Totals(**content["totals"])

    def make(self, part: int, workers: int) -> Totals:
        """Make a part if it is not complete. Raises Refusal."""
        if done := self.done(part):
            remove_left(self.name(part))
            return done
        with one_job(self.name(part)) as owner:
            if done := self.done(part):
                return done
            path = f"{self.name(part)}.json"
            with suppress(FileNotFoundError):
                os.unlink(path)
            size = sum(self.sizes)
            begin, end = (size * part // self.count, size * (part + 1) // self.count)
            span = (begin, end if part + 1 < self.count else ALL[1])
            reader = Reader(list(self.work.paths), self.work.settings.columns(), span, self.sizes)
            totals = write_tokens(self.work, self.name(part), reader, workers, True, manifest=path, owner=owner)
            self._check_unchanged(*span)
            with atomic_files([path], True, owner) as (temporary,):
                write_manifest(temporary, {"identity": self.identity, "part": part, "of": self.count,
                                           "prefix": self.prefix, "keys": self.work.settings.keys,
                                           "totals": asdict(totals),
                                           "metadata": self.work.settings.metadata is not None})  # fmt: skip
        return totals

    def _check_unchanged(self, begin: float, end: float) -> None:
        """Refuse a part if a file of its share is not the one that was divided."""
        before = 0
        for path, size, content in zip(self.work.paths, self.sizes, self.contents):
            if before < end and before + size >= begin and content_of(path) != content:
                raise Refusal(f"--input {path}: changed while parts of it were made: start again with --overwrite")
            before += size

    def check_first(self) -> None:
        """Refuse, before a part is made, if another complete part is of other work."""
        for name in _manifests(self.folder):
            if name.endswith(f"-of-{self.count:05}.json"):
                self.done(int(name.partition("-")[0]))
                return

    def remove_others(self) -> None:
        """Remove complete parts of other work, except those that another job makes now."""
        for name in _manifests(self.folder):
            path = os.path.join(self.folder, name)
            content = read_json(path)
            if isinstance(content, dict) and _is_part(content) and content["identity"] != self.identity:
                with suppress(InUse), one_job(path.removesuffix(".json")):
                    remove_listed(self.folder, _files_of(content))


def divide(work: Work, prefix: str, count: int | None, overwrite: bool) -> Parts:
    """The parts of some work; ``count`` of them, by default one for each 64 MiB.

    Raises:
        Refusal: the input cannot be read, or cannot be recognized when the work is continued.
    """
    reader = Reader(list(work.paths))
    count = count or max(1, min(10_000, -(-sum(reader.sizes) // PART_BYTES)))
    files = [value for _, value in work.settings.tokenizer if isinstance(value, str) and os.path.exists(value)]
    try:
        contents, tokenizer = tuple(map(content_of, work.paths)), list(map(content_of, files))
    except OSError as error:
        raise Refusal(f"--input: {error.filename or 'a file'} cannot be read: {reason(error)}") from None
    for path, content in zip(work.paths, contents):
        if not content or content[-1] == "":
            kind = "a URL without a version (ETag)" if content else "a pipe"
            raise Refusal(
                f"--input {path}: {kind}, so that parts made at different times could be of different data: copy it "
                "to a file, or leave out --partitions and --engine"
            )
    about = {"tokenizer": tokenizer, "paths": work.paths, "contents": contents, "settings": asdict(work.settings),
             "skip_bad": work.skip_bad, "parts": count}  # fmt: skip
    identity = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    return Parts(work, prefix, count, identity, tuple(reader.sizes), contents, overwrite)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return -1


def _manifests(folder: str) -> list[str]:
    """The names of all parts' manifests; none if there is no folder. Raises Refusal."""
    try:
        return sorted(name for name in os.listdir(folder) if MANIFEST.fullmatch(name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Refusal(f"{folder}: cannot be read: {error.strerror}") from None


def _files_of(content: dict[str, Any]) -> list[str]:
    """The names of all files of a part, by its manifest."""
    name = f"{content['part']:05}-of-{content['of']:05}"
    ends = ("bin", "idx", "json", "metadata.jsonl")
    return [*(f"{name}_{key}_document.{end}" for key in content["keys"] for end in ends), f"{name}.json"]


def read_parts(folder: str) -> list[dict[str, Any]]:
    """The manifests of all parts in a folder, in order.

    Raises:
        Refusal: a part is missing, or of other work than the first.
    """
    manifests: dict[int, dict[str, Any]] = {}
    for name in _manifests(folder):
        path = os.path.join(folder, name)
        content = read_json(path)
        valid = isinstance(content, dict) and _is_part(content)
        if not valid or name != f"{content['part']:05}-of-{content['of']:05}.json":
            raise Refusal(f"{path}: not the manifest of a part: remove it, and make the part again")
        for key in content["keys"]:
            entry = read_manifest(one := os.path.join(folder, f"{name.removesuffix('.json')}_{key}_document.json"))
            if entry is None:
                raise Refusal(f"{one}: no such file: make this part again")
            counts = [content["totals"][what].get(key, 0) for what in ("documents", "tokens")]
            if counts != [entry["documents"], entry["tokens"]]:
                raise Refusal(f"{path} and {one} count different documents: remove the first, and make the part again")
        manifests[content["part"]] = content
    first = next(iter(manifests.values()), None)
    if first is None:
        raise Refusal(f"{folder}: no complete part")
    missing = [part for part in range(first["of"]) if part not in manifests]
    if missing:
        raise Refusal(f"{folder}: part {missing[0]} is not complete, and {len(missing)} of {first['of']} are missing")
    for part, content in manifests.items():
        if any(content[name] != first[name] for name in ("identity", "keys", "of", "metadata")):
            raise Refusal(f"{folder}: parts 0 and {part} are of different work: remove one, and make it again")
    return [manifests[part] for part in range(first["of"])]


def merge_parts(
    folder: str, prefix: str, overwrite: bool, keep: bool = False
) -> tuple[Totals, dict[str, str], list[str]]:
    """Merge the complete parts of a folder, and remove them: whoever calls it has the lock of the folder.

    Args:
        prefix: of the outputs, PREFIX_KEY_document.
        keep: do not remove the parts.

    Returns:
        The counts, for each key the prefix of the token files, and a line about files that are left in the folder.

    Raises:
        Refusal: a part is missing, damaged, or of other work.
    """
    manifests, totals, outputs, notes = read_parts(folder), Totals(), {}, []

    def unchanged() -> None:
        if read_parts(folder) != manifests:
            raise Refusal(f"{folder}: another job makes parts again: merge them when it has ended")

    for content in manifests:
        totals.include(Totals(**content["totals"]))
    for key in manifests[0]["keys"]:
        outputs[key] = f"{prefix}_{key}_document"
        if not totals.documents.get(key):
            raise Refusal(f'--input: no document with text under the key "{key}"')
    for key, output in outputs.items():
        pieces = [os.path.join(folder, f"{part:05}-of-{len(manifests):05}_{key}_document")
                  for part in range(len(manifests))]  # fmt: skip
        lines = [f"{piece}.metadata.jsonl" for piece in pieces] if manifests[0]["metadata"] else ()
        merge(pieces, output, overwrite, lines, unchanged)
    if not keep:
        try:
            left = remove_listed(folder, [name for content in manifests for name in _files_of(content)])
            if left:
                notes.append(f"{folder} is kept: it has other files than these parts: {some(left)}")
        except OSError as error:
            notes.append(f"{error.filename or folder} cannot be removed: {reason(error)}")
    return totals, outputs, notes


def _is_part(content: dict[str, Any]) -> bool:
    """Whether the manifest of a part has the fields that are used, with their types."""
    part, count, keys, totals = (content.get(name) for name in ("part", "of", "keys", "totals"))
    counts = isinstance(totals, dict) and totals.keys() == asdict(Totals()).keys() and all(
        isinstance(value, type(default)) for value, default in
        ((totals[name], default) for name, default in asdict(Totals()).items())
    )  # fmt: skip
    counts = counts and all(type(n) is int for name in ("documents", "tokens") for n in totals[name].values())
    return (
        type(part) is int and type(count) is int and 0 <= part < count <= MOST_PARTS and isinstance(keys, list)
        and all(isinstance(key, str) and "/" not in key for key in keys) and len(set(keys)) == len(keys) > 0
        and bool(counts)
        and isinstance(content.get("identity"), str) and isinstance(content.get("metadata"), bool)
    )  # fmt: skip


def make_here(parts: Parts, chosen: range, workers: int) -> Iterator[tuple[int, Totals]]:
    """Make the chosen parts one after another in this process, with ``workers`` processes for each."""
    for part in chosen:
        try:
            yield part, parts.make(part, workers)
        except MemoryError:
            raise no_memory(f"part {part} of {parts.count}") from None


def make_with_ray(parts: Parts, workers: int) -> Iterator[tuple[int, Totals]]:
    """Make all parts as tasks of Ray, ``workers`` at a time, in the order in which they become complete.

    A task whose worker process or node dies is started again. Ray runs on this machine, unless a cluster was named by
    RAY_ADDRESS, whose nodes must see the input and the output under the same paths.

    Raises:
        Refusal: Ray is not installed; or a part cannot be made.
    """
    try:
        import ray
    except ImportError:
        raise Refusal("--engine ray needs the package ray: pip install ray, or the extra ray") from None
    started = not ray.is_initialized()
    if started:
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__)))))
        variables = {"PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)]), "TOKENIZERS_PARALLELISM": "false"}
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        options |= {} if "RAY_ADDRESS" in os.environ else {"num_cpus": workers}
        ray.init(**options, runtime_env={"env_vars": variables})
    try:
        task = ray.remote(num_cpus=1, max_retries=5)(_make_in_task)
        waiting = {task.remote(parts, part): part for part in range(parts.count)}
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            try:
                totals = ray.get(ready)
            except ray.exceptions.RayError as error:
                raise Refusal(f"part {waiting[ready]} of {parts.count}: {str(error).splitlines()[0]}") from None
            if isinstance(totals, str):
                raise Refusal(totals)
            yield waiting.pop(ready), totals
    finally:
        if started:
            ray.shutdown()


def _make_in_task(parts: Parts, part: int) -> Totals | str:
    """Make a part in a task; a refusal is returned as its text, since Ray repeats a task that raises."""
    try:
        return parts.make(part, 1)
    except Refusal as error:
        return str(error)


def dtype_for(vocab_size: int) -> np.dtype:
    """The dtype of token ids, as megatron-core chooses it. Raises Refusal if they fit in none."""
    if vocab_size > 2**31:
        raise Refusal(f"--vocab-size: a vocabulary of {vocab_size:,} ids; token files have at most {2**31:,}")
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)
