# SPDX-License-Identifier: Apache-2.0
"""Megatron's .bin/.idx files, checked before anything is built on them, and the index caches beside them.

megatron-core finds a missing or truncated file late or never (short reads, an endless loop on an empty split), and its
index cache goes by path alone: data written anew under an old name would be read through the old indices.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from megatron.training.arguments.config import DataConfig
from megatron.training.arguments.data_paths import Blend, parse_blend, weighted_groups
from megatron.training.data.read_tokens import DataError, FileArray, OpenFile, TokenFile, check_ids
from megatron.training.disk import sync_tree
from megatron.training.json_file import read_bytes, read_json
from megatron.training.refusal import Refusal, one_line, reason

# A folder of a cache that appears whole or not at all, whoever else makes the same one at the same time.
#
# It is filled under a name of its own and then renamed: of several builders the first one wins, and what an interrupted
# one leaves behind is never taken for a cache. A list of its files tells when some of them were deleted later.


LIST = "files.json"  # {name: bytes}
LEFT_BEHIND = 24 * 3600  # seconds after which an unfinished folder is not being built any more


@contextmanager
def whole_folder(folder: str) -> Iterator[str]:
    """Yields a folder beside ``folder`` to fill, which takes that name when all went well, and goes otherwise.

    Raises:
        OSError: nothing can be written there; or ``folder`` is there, because another run was faster.
    """
    temporary = f"{folder}.{uuid.uuid4().hex}.tmp"  # two containers may agree in host name and process number
    try:
        os.makedirs(temporary)
        _remove_left_behind(*os.path.split(folder), os.stat(temporary).st_mtime)
        yield temporary
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(temporary)}
        with open(os.path.join(temporary, LIST), "w", encoding="utf-8") as file:
            json.dump(sizes, file, indent=2, sort_keys=True)
        sync_tree(temporary)  # after a power cut, what has the name must be whole
        os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_whole(folder: str) -> None:
    """Check that all files are there, each with its size.

    Raises:
        Refusal: some are not.
    """
    name = LIST
    try:
        with open(os.path.join(folder, LIST), encoding="utf-8") as file:
            sizes = json.load(file)
        for name, size in sizes.items():
            if (found := os.path.getsize(os.path.join(folder, name))) != size:
                raise ValueError(f"{found} bytes in place of {size}")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise Refusal(
            f"{folder} is not whole any more ({name}: {reason(error)}): remove it, and it is made anew"
        ) from None


def _remove_left_behind(root: str, name: str, now: float) -> None:
    """Remove what runs that were killed have left of the same folder; ``now``: by the clock of the file system."""
    with suppress(OSError):  # another run removes it too
        for entry in os.scandir(root):
            if entry.name.startswith(f"{name}.") and entry.name.endswith(".tmp"):
                if now - entry.stat().st_mtime > LEFT_BEHIND:
                    shutil.rmtree(entry.path, ignore_errors=True)


HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
MAGIC, NPY = b"MMIDIDX\x00\x00", b"\x93NUMPY"
LONGEST_HEADER = 10_000  # bytes of a .npy; numpy parses no longer ones
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
FORM = 2  # of index caches: a folder with a list of its files


@dataclass(frozen=True)
class DataFile:
    """One prefix whose .bin and .idx are whole."""

    prefix: str
    dtype: type[np.integer]
    sequences: int
    identity: tuple  # changes when the data does

    def lengths(self) -> FileArray:
        """Tokens of each document."""
        return FileArray(OpenFile(f"{self.prefix}.idx"), np.int32, (self.sequences,), HEADER.size)

    def starts(self) -> FileArray:
        """Where each document begins in the .bin, in bytes."""
        offset = HEADER.size + 4 * self.sequences
        return FileArray(OpenFile(f"{self.prefix}.idx"), np.int64, (self.sequences,), offset)

    def open(self) -> TokenFile:
        """The documents."""
        return TokenFile(self.prefix, self.dtype, self.lengths(), self.starts())


def named_sets(data: DataConfig, split: str) -> list[str]:
    """Names of the data that ``split`` is evaluated on one by one; none where there is one set alone."""
    groups = weighted_groups(data, split)
    return [group.name for group in groups] if len(groups) > 1 else []


def parse_blends(data: DataConfig, number: int = 0) -> tuple[Blend | None, list[Blend | None] | None]:
    """The blend of --data-path, or one blend each for train, valid and test; never both.

    Args:
        number: which of several sets of valid and test data.
    """
    groups = [weighted_groups(data, split) for split in ("train", "valid", "test")]
    if any(groups):
        chosen = [group[number] if number < len(group) else None for group in groups]
        return None, [
            group and (group.prefixes, group.weights if len(group.prefixes) > 1 else None) for group in chosen
        ]
    if data.data_args_path or data.data_file_list:
        return _blend_in_file(data), None
    if data.per_split_data_args_path:
        return None, _blends_in_file(data.per_split_data_args_path)
    paths = [data.train_data_path, data.valid_data_path, data.test_data_path]
    flags = ["--train-data-path", "--valid-data-path", "--test-data-path"]
    given = [flag for flag, path in zip(flags, paths) if path is not None]
    if data.data_path is not None:
        if given:
            raise Refusal(f"--data-path and {given[0]} exclude each other: split one blend, or give one a split")
        return parse_blend(data.data_path, "--data-path"), None
    if not given:
        raise Refusal("no data: give --data-path, or --train-data-path, or --mock-data")
    if data.split is not None:
        raise Refusal(f"--split and {given[0]} exclude each other: --split divides --data-path")
    return None, [None if path is None else parse_blend(path, flag) for flag, path in zip(flags, paths)]


def _blend_in_file(data: DataConfig) -> Blend:
    """--data-args-path: the words of --data-path. --data-file-list: weight, prefix and a name, line by line."""
    if data.data_args_path:
        return parse_blend(_text(data.data_args_path, "--data-args-path").split(), "--data-args-path")
    flag = "--data-file-list"
    lines = [line.split() for line in _text(data.data_file_list, flag).splitlines() if line.strip()]
    if not lines or any(len(line) != 3 for line in lines):
        raise Refusal(f"{flag} {data.data_file_list}: not a line WEIGHT PREFIX CORPUS for each part: give it so")
    return parse_blend([word for weight, prefix, _ in lines for word in (weight, prefix.removesuffix(".bin"))], flag)


def _blends_in_file(path: str) -> list[Blend | None]:
    flag = "--per-split-data-args-path"
    content = read_json(path, flag)
    try:
        words = [content[split] for split in ("train", "valid", "test")]
        words = [part.split() if isinstance(part, str) else list(part or ()) for part in words]
        if not all(isinstance(word, str | int | float) for part in words for word in part):
            raise TypeError
        words = [[str(word) for word in part] for part in words]
    except (KeyError, TypeError):
        raise Refusal(f'{flag} {path}: no JSON object with lists "train", "valid" and "test": give it so') from None
    return [parse_blend(part, flag) if part else None for part in words]


def _text(path: str, flag: str) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as error:
        raise Refusal(f"{flag} {path}: {(error.strerror or 'cannot be read').lower()}") from None
    except ValueError as error:
        raise Refusal(f"{flag} {path}: no text: {reason(error)}") from None


def open_prefix(prefix: str, flag: str) -> DataFile:
    """Check that both files of a prefix exist and are whole: cheap, whatever their size."""
    paths = {extension: f"{prefix}.{extension}" for extension in ("bin", "idx")}
    for path in paths.values():
        if not os.path.isfile(path):
            raise Refusal(f"{flag} {prefix}: no such file: {path}")
    try:
        return _open_prefix(prefix, flag, paths)
    except OSError as error:
        raise Refusal(f"{flag} {prefix}: {error.filename or prefix} cannot be read: {reason(error)}") from None


def _open_prefix(prefix: str, flag: str, paths: dict[str, str]) -> DataFile:
    idx, idx_stat, bin_stat = paths["idx"], os.stat(paths["idx"]), os.stat(paths["bin"])
    with open(idx, "rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise Refusal(f"{flag} {prefix}: {idx} is not a Megatron index")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1 or code not in TOKEN_TYPES:
            raise Refusal(f"{flag} {prefix}: {idx} has version {version} and data type {code}, which we do not read")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if idx_stat.st_size not in (expected, expected + sequences):  # a byte a sequence more: multimodal
            raise Refusal(f"{flag} {prefix}: {idx} holds {idx_stat.st_size} bytes, expected {expected}: damaged")
        if sequences == 0:
            raise Refusal(f"{flag} {prefix}: {idx} holds no documents")
        file.seek(HEADER.size + 12 * sequences + 8 * (documents - 1))
        if documents == 0 or struct.unpack("<q", file.read(8)) != (sequences,):  # core asserts it
            raise Refusal(f"{flag} {prefix}: the documents of {idx} do not end with its last sequence: damaged")
        file.seek(HEADER.size + 4 * (sequences - 1))
        (last_length,) = struct.unpack("<i", file.read(4))
        file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
        (last_start,) = struct.unpack("<q", file.read(8))
    expected = last_start + last_length * np.dtype(TOKEN_TYPES[code]).itemsize
    if bin_stat.st_size != expected:
        what = "truncated" if bin_stat.st_size < expected else "not the file of this .idx"
        raise Refusal(
            f"{flag} {prefix}: {paths['bin']} holds {bin_stat.st_size} bytes, expected {expected} from the .idx: {what}"
        )
    identity = (prefix, bin_stat.st_size, bin_stat.st_mtime_ns, idx_stat.st_size, idx_stat.st_mtime_ns)
    return DataFile(prefix, TOKEN_TYPES[code], sequences, identity)


def check_order(file: DataFile, flag: str, block: int = 1 << 20) -> None:
    """Check that each document begins where the one before ends, as Megatron writes them: reads the whole .idx."""
    lengths, starts, size = file.lengths(), file.starts(), np.dtype(file.dtype).itemsize
    for first in range(0, file.sequences, block):
        of_block, ends = starts[first : first + block + 1], lengths[first : first + block].astype(np.int64) * size
        ends += of_block[: len(ends)]
        wrong = (ends < of_block[: len(ends)]).nonzero()[0]
        if not len(wrong):
            wrong = (ends[: len(of_block) - 1] != of_block[1:]).nonzero()[0]
        if len(wrong) or starts[0] != 0:
            document = first + int(wrong[0]) if len(wrong) else 0
            raise Refusal(
                f"{flag} {file.prefix}: in {file.prefix}.idx, document {document} does not end where the next one "
                "begins: damaged"
            )


def load_numbers(path: str) -> np.ndarray:
    """The array in a .npy file, in a memory map: whole, and of numbers or truths alone; nothing is unpickled.

    Raises:
        OSError, ValueError: it is something else.
    """
    with open(path, "rb") as file:
        head = file.read(len(NPY) + 6)
        if not head.startswith(NPY):  # numpy opens archives too
            raise ValueError("not a .npy file")
        length = head[8:10] if head[6:7] == b"\x01" else head[8:12]
        if int.from_bytes(length, "little") > LONGEST_HEADER:  # numpy would ask for that much memory
            raise ValueError("its header is too long")
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        raise
    except Exception as error:  # whatever a header that is no header makes numpy and Python's parser raise
        raise ValueError(one_line(error, 100)) from None
    if found.dtype.kind not in "iub":
        raise ValueError("not an array of whole numbers")
    return found


def check_cache(folder: str) -> None:
    """Check that cached indices are whole and nothing but numbers: core would unpickle what says that it is pickled."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".npy"):
            path = os.path.join(folder, name)
            try:
                load_numbers(path)
            except (OSError, ValueError) as error:
                raise Refusal(
                    f"{path} is no index of data ({one_line(error, 100)}): remove {folder}, and it is made anew"
                ) from None
    check_whole(folder)


def check_token_ids(file: DataFile, vocab_size: int, source: str, documents: int = 64, tokens: int = 4096) -> None:
    """Look for ids outside the vocabulary in a sample of the documents, first and last included."""
    chosen = np.unique(np.linspace(0, file.sequences - 1, min(documents, file.sequences)).astype(np.int64))
    try:
        reader = file.open()
        for document in chosen:
            ids = reader.get(int(document), 0, min(reader.lengths[document], tokens))
            check_ids(ids, vocab_size, source, functools.partial(reader.where, document))
    except DataError as error:
        raise Refusal(str(error)) from None


def check_document_ends(file: DataFile, eod: int, documents: int = 64) -> None:
    """Look whether any of a sample of the documents ends as packed ones have to, with the end-of-document token."""
    lengths, starts, size = file.lengths(), file.starts(), np.dtype(file.dtype).itemsize
    chosen = np.unique(np.linspace(0, file.sequences - 1, min(documents, file.sequences)).astype(np.int64))
    with open(f"{file.prefix}.bin", "rb") as stream:
        for document in chosen:
            if lengths[document]:
                stream.seek(int(starts[document]) + (int(lengths[document]) - 1) * size)
                if np.fromfile(stream, file.dtype, 1)[0] == eod:
                    return
    raise Refusal(
        f"{file.prefix}.bin: no document ends with token {eod}, the tokenizer's end of document, where "
        "--reset-attention-mask and --reset-position-ids look for it: write the data with "
        "tools/preprocess_data.py --append-eod, or leave them out"
    )


def documents_of(file: DataFile, share: tuple[float, float]) -> range:
    """The documents of a split, rounded as core does."""
    return range(*(round(bound * float(file.sequences)) for bound in share))


def check_share(file: DataFile, share: tuple[float, float], need: int, name: str, flag: str) -> None:
    """Check that a split's documents hold at least ``need`` tokens; core loops forever where there are none."""
    documents, found = documents_of(file, share), 0
    if documents:
        starts, size = file.starts(), np.dtype(file.dtype).itemsize
        found = int(starts[documents[-1]] - starts[documents[0]]) // size + int(file.lengths()[documents[-1]])
    if found < need:
        raise Refusal(
            f"{flag} {file.prefix}: the {name} split gets {len(documents)} of {file.sequences} documents with {found} "
            f"tokens, at least {need} are needed: change --split, or give --{name}-data-path"
        )


def cache_folder(data: DataConfig, files: list[DataFile], parts: dict) -> str:
    """The folder of one set of indices: next to the data unless told otherwise, named by all that they depend on."""
    root = data.data_cache_path or os.path.join(os.path.dirname(os.path.abspath(files[0].prefix)), "index-cache")
    text = json.dumps({"files": [file.identity for file in files], "form": FORM, **parts}, sort_keys=True)
    return os.path.join(root, hashlib.sha256(text.encode()).hexdigest()[:24])
