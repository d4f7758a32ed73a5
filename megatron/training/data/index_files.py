# SPDX-License-Identifier: Apache-2.0
"""Checks Megatron's .bin/.idx files before they are used, and keeps the caches of sample indices.

megatron-core notices a missing or truncated file late or never (short reads, an endless loop on an empty split). Its
index cache depends only on the path, so new data under an old name would be read with the old indices.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.training.arguments.data_paths import Blend, parse_blend, weighted_groups
from megatron.training.data.packing.length_mixtures import read_mixture
from megatron.training.data.read_tokens import DataError, FileArray, OpenFile, TokenFile, check_ids
from megatron.training.data.sources.contents import content_of, digest_of
from megatron.training.data.sources.remote import BLOCK, exists, is_remote, open_input, properties
from megatron.training.json_file import read_json, read_text
from megatron.training.ownership.atomic import atomic_files, check_complete
from megatron.training.ownership.lock_file import InUse
from megatron.training.ownership.own_files import one_job
from megatron.training.refusal import Refusal, one_line, reason
from megatron.training.settings.config import DataConfig

HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
MAGIC, NPY = b"MMIDIDX\x00\x00", b"\x93NUMPY"
LONGEST_HEADER = 10_000  # limit of a .npy header in bytes, as in numpy
TOKEN_TYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
LONGEST_COPY = 600.0  # seconds in which another process must have copied an index
FORM = 3  # version of index caches: a folder with a list of its files and their checksums


@dataclass(frozen=True)
class DataFile:
    """A prefix whose .bin and .idx are complete.

    Attributes:
        version: sizes and versions of files at a URL.
        index: the .idx in the file system.
    """

    prefix: str
    dtype: type[np.integer]
    sequences: int
    version: tuple[Any, ...]
    index: str

    def lengths(self) -> FileArray:
        """Tokens of each document."""
        return FileArray(OpenFile(self.index), np.int32, (self.sequences,), HEADER.size)

    def starts(self) -> FileArray:
        """The offset of each document in the .bin, in bytes."""
        offset = HEADER.size + 4 * self.sequences
        return FileArray(OpenFile(self.index), np.int64, (self.sequences,), offset)

    def identity(self) -> list[Any]:
        """What changes when the data do. Raises OSError."""
        if is_remote(self.prefix):
            return [self.prefix, *self.version]
        return [self.prefix, *(content_of(f"{self.prefix}.{end}") for end in ("bin", "idx"))]

    def open(self) -> TokenFile:
        """The documents."""
        return TokenFile(self.prefix, self.dtype, self.lengths(), self.starts())


def named_sets(data: DataConfig, split: str) -> list[str]:
    """Names of the sets on which ``split`` is evaluated separately; empty if there is only one set."""
    groups = weighted_groups(data, split)
    return [group.name for group in groups] if len(groups) > 1 else []


def parse_blends(data: DataConfig, number: int = 0) -> tuple[Blend | None, list[Blend | None] | None]:
    """The blend of --data-path, or one blend each for train, valid and test; never both.

    Args:
        number: the index among several sets of valid and test data.
    """
    groups = [weighted_groups(data, split) for split in ("train", "valid", "test")]
    if any(groups):
        chosen = [group[number] if number < len(group) else None for group in groups]
        return None, [
            group and (group.prefixes, group.weights if len(group.prefixes) > 1 else None) for group in chosen
        ]
    if data.data_config:
        sources = read_mixture(data.data_config)
        return ([source.path for source in sources], [source.weight for source in sources]), None
    if data.data_args_path or data.data_file_list:
        return _blend_in_file(data), None
    if data.per_split_data_args_path:
        return None, _blends_in_file(data.per_split_data_args_path)
    paths = [data.train_data_path, data.valid_data_path, data.test_data_path]
    flags = ["--train-data-path", "--valid-data-path", "--test-data-path"]
    given = [flag for flag, path in zip(flags, paths) if path is not None]
    if data.data_path is not None:
        if given:
            raise Refusal(f"--data-path and {given[0]} exclude each other: split one blend, or give one per split")
        return parse_blend(data.data_path, "--data-path"), None
    if not given:
        raise Refusal("no data: give --data-path, or --train-data-path, or --mock-data")
    if data.split is not None:
        raise Refusal(f"--split and {given[0]} exclude each other: --split divides --data-path")
    return None, [None if path is None else parse_blend(path, flag) for flag, path in zip(flags, paths)]


def _blend_in_file(data: DataConfig) -> Blend:
    """--data-args-path has the words of --data-path; --data-file-list has a weight, a prefix and a name per line."""
    if data.data_args_path:
        return parse_blend(read_text(data.data_args_path, "--data-args-path").split(), "--data-args-path")
    flag = "--data-file-list"
    lines = [line.split() for line in read_text(data.data_file_list, flag).splitlines() if line.strip()]
    if not lines or any(len(line) != 3 for line in lines):
        raise Refusal(f"{flag} {data.data_file_list}: each line must be WEIGHT PREFIX CORPUS")
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
        raise Refusal(f'{flag} {path}: must be a JSON object with lists "train", "valid", "test"') from None
    return [parse_blend(part, flag) if part else None for part in words]


def open_prefix(prefix: str, flag: str, cache: str | None = None) -> DataFile:
    """Check that both files of a prefix exist and are complete, in a time that does not depend on their size.

    Args:
        prefix: of files, or a URL.
        cache: folder for copies of remote indices.
    """
    paths = {extension: f"{prefix}.{extension}" for extension in ("bin", "idx")}
    if is_remote(prefix) and not cache:
        raise Refusal(f"{flag} {prefix}: give --object-storage-cache-path FOLDER for a copy of its index")
    if "::" in prefix and is_remote(prefix):
        raise Refusal(f"{flag} {prefix}: name the files by one URL, without :: for copies or archives")
    try:
        for path in paths.values():
            if not (exists(path) if is_remote(path) else os.path.isfile(path)):
                text = not is_remote(path) and os.path.exists(prefix)
                how = f"; {prefix} itself is no tokens: tools/preprocess_data.py makes them of text" if text else ""
                raise Refusal(f"{flag} {prefix}: no such file: {path}{how}")
        return _open_prefix(prefix, flag, paths, cache)
    except OSError as error:
        raise Refusal(f"{flag} {prefix}: {error.filename or prefix} cannot be read: {reason(error)}") from None


def _copied(idx: str, size: int, version: str, cache: str) -> tuple[str, str]:
    """A copy of a remote .idx with its checksum, which all processes of a machine share; the first one makes it.

    Returns:
        Its path, and the version of the original: if the server gives none, the SHA-256 of what it sends now.
    """
    content = "" if version else digest_of(idx)
    version = version or content
    name = os.path.join(cache, hashlib.sha256(json.dumps([idx, size, version]).encode()).hexdigest()[:24])
    path, checksum = f"{name}.idx", f"{name}.sha256"

    def is_whole() -> bool:
        with suppress(FileNotFoundError), open(checksum, encoding="ascii", errors="replace") as file:
            return file.read(100) == digest_of(path)
        return False

    try:
        os.makedirs(cache, exist_ok=True)
        if is_whole():
            return path, version
        with one_job(name, LONGEST_COPY) as owner:
            if not is_whole():
                with atomic_files([path, checksum], True, owner) as (copy, sum_of_copy):
                    with open_input(idx) as source, open(copy, "wb") as out:
                        shutil.copyfileobj(source, out, BLOCK)
                    if os.path.getsize(copy) != size or content not in ("", digest_of(copy)):
                        raise OSError("it was cut off, or changed while it was read")
                    with open(sum_of_copy, "w", encoding="ascii") as out:
                        out.write(digest_of(copy))
    except InUse as error:
        raise Refusal(f"--object-storage-cache-path {cache}: {error.state}: end it, or give another folder") from None
    except OSError as error:
        raise Refusal(f"--object-storage-cache-path {cache}: {idx} cannot be copied there: {reason(error)}") from None
    return path, version


def _open_prefix(prefix: str, flag: str, paths: dict[str, str], cache: str | None) -> DataFile:
    idx, (idx_size, idx_version), (bin_size, bin_version) = paths["idx"], *map(properties, (paths["idx"], paths["bin"]))
    index = idx
    if is_remote(idx):
        index, idx_version = _copied(idx, idx_size, idx_version, cache)
    with open(index, "rb") as file:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise Refusal(f"{flag} {prefix}: {idx} is not a Megatron index")
        _, version, code, sequences, documents = HEADER.unpack(head)
        if version != 1 or code not in TOKEN_TYPES:
            raise Refusal(f"{flag} {prefix}: {idx} has version {version} and data type {code}, which cannot be read")
        expected, actual = HEADER.size + 12 * sequences + 8 * documents, os.path.getsize(index)
        if actual not in (expected, expected + sequences):  # one byte more per sequence: multimodal
            raise Refusal(f"{flag} {prefix}: {idx} holds {actual} bytes, expected {expected}: damaged")
        if sequences == 0:
            raise Refusal(f"{flag} {prefix}: {idx} holds no documents")
        file.seek(HEADER.size + 12 * sequences + 8 * (documents - 1))
        if documents == 0 or struct.unpack("<q", file.read(8)) != (sequences,):  # core asserts this
            raise Refusal(f"{flag} {prefix}: the documents of {idx} do not end with its last sequence: damaged")
        file.seek(HEADER.size + 4 * (sequences - 1))
        (last_length,) = struct.unpack("<i", file.read(4))
        file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
        (last_start,) = struct.unpack("<q", file.read(8))
    expected = last_start + last_length * np.dtype(TOKEN_TYPES[code]).itemsize
    if bin_size != expected:
        problem = "truncated" if bin_size < expected else "not the file of this .idx"
        raise Refusal(
            f"{flag} {prefix}: {paths['bin']} holds {bin_size} bytes, expected {expected} from the .idx: {problem}"
        )
    return DataFile(prefix, TOKEN_TYPES[code], sequences, (bin_size, bin_version, idx_size, idx_version), index)


def check_order(file: DataFile, flag: str, block: int = 1 << 20) -> None:
    """Check that each document begins at the end of the previous one, as Megatron writes it. Reads all of the .idx."""
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


def load_numbers(path: str, kinds: str = "iub") -> np.ndarray:
    """The memory-mapped array of integers or booleans (numpy's ``kinds``) in a complete .npy file, without unpickling.

    Raises:
        OSError, ValueError: the file is something else.
    """
    with open(path, "rb") as file:
        head = file.read(len(NPY) + 6)
        if not head.startswith(NPY):  # numpy would also open an archive
            raise ValueError("not a .npy file")
        length = head[8:10] if head[6:7] == b"\x01" else head[8:12]
        if int.from_bytes(length, "little") > LONGEST_HEADER:  # numpy would allocate as much memory
            raise ValueError("its header is too long")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        raise
    except Exception as error:  # an invalid header may make numpy and Python's parser raise anything
        raise ValueError(one_line(error, 100)) from None
    if array.dtype.kind not in kinds:
        raise ValueError("not an array of integers")
    return array


def check_cache(folder: str) -> None:
    """Check that cached indices are complete arrays of numbers: core would unpickle a file that says it is pickled."""
    for name in sorted(os.listdir(folder)):
        if name.endswith(".npy"):
            path = os.path.join(folder, name)
            try:
                load_numbers(path)
            except (OSError, ValueError) as error:
                raise Refusal(
                    f"{path} is not an index of data ({one_line(error, 100)}): remove {folder}, and it is built again"
                ) from None
    check_complete(folder)


def check_token_ids(file: DataFile, vocab_size: int, source: str, documents: int = 64, tokens: int = 4096) -> None:
    """Look for ids outside the vocabulary in a sample of the documents, including the first and the last."""
    chosen = np.unique(np.linspace(0, file.sequences - 1, min(documents, file.sequences)).astype(np.int64))
    try:
        reader = file.open()
        parts = [(document, 0, min(reader.size(document), tokens)) for document in chosen.tolist()]
        for document, ids in zip(chosen, reader.get_many(parts)):
            check_ids(ids, vocab_size, source, functools.partial(reader.where, document))
    except DataError as error:
        raise Refusal(str(error)) from None


def check_document_ends(file: DataFile, eod: int, documents: int = 64) -> None:
    """Check that at least one of some sampled documents ends with the end-of-document token, which packing needs."""
    chosen = np.unique(np.linspace(0, file.sequences - 1, min(documents, file.sequences)).astype(np.int64)).tolist()
    try:
        reader = file.open()
        last = [(document, size - 1, 1) for document in chosen if (size := reader.size(document))]
        if any(ids[0] == eod for ids in reader.get_many(last)):
            return
    except DataError as error:
        raise Refusal(str(error)) from None
    raise Refusal(
        f"{file.prefix}.bin: no document ends with token {eod}, the tokenizer's end of document, which "
        "--reset-attention-mask and --reset-position-ids need: write the data with "
        "tools/preprocess_data.py --append-eod, or leave them out"
    )


def documents_of(file: DataFile, share: tuple[float, float]) -> range:
    """The documents of a split, rounded as core does."""
    return range(*(round(bound * float(file.sequences)) for bound in share))


def check_share(file: DataFile, share: tuple[float, float], need: int, name: str, flag: str) -> None:
    """Check that the documents of a split hold at least ``need`` tokens; with no tokens, core loops forever."""
    documents, tokens = documents_of(file, share), 0
    if documents:
        starts, size = file.starts(), np.dtype(file.dtype).itemsize
        tokens = int(starts[documents[-1]] - starts[documents[0]]) // size + int(file.lengths()[documents[-1]])
    if tokens < need:
        raise Refusal(
            f"{flag} {file.prefix}: the {name} split gets {len(documents)} of {file.sequences} documents with {tokens} "
            f"tokens, at least {need} are needed: change --split, or give --{name}-data-path"
        )


def cache_folder(data: DataConfig, files: list[DataFile], parts: dict) -> str:
    """The folder of a set of indices, named by a hash of everything they depend on; by default next to an .idx."""
    beside = os.path.dirname(os.path.abspath(files[0].index))
    root = data.data_cache_path or os.path.join(beside, "index-cache")
    text = json.dumps({"files": [file.identity() for file in files], "form": FORM, **parts}, sort_keys=True)
    return os.path.join(root, hashlib.sha256(text.encode()).hexdigest()[:24])
