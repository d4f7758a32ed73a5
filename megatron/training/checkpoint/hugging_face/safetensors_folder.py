# SPDX-License-Identifier: Apache-2.0
"""Read and write folders of .safetensors files, one tensor at a time; headers are checked before anything is read.

A file consists of eight bytes with the length of its header, the header (JSON: name -> dtype, shape, offsets), and the
data. The library needs all tensors of a file at once to write it; this module needs memory
for the largest tensor only. A model's original header can be written again, so that the file is the same byte for byte.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.file_list import CHECKSUMS, WRITTEN
from megatron.training.checkpoint.megatron_lm.places import TRACKER
from megatron.training.disk import sync_folders_up, sync_tree
from megatron.training.families.llama.llama_settings import DTYPES
from megatron.training.json_file import parse_json, read_bytes
from megatron.training.ownership.own_files import one_job, remove_made, temporary_name, unfinished
from megatron.training.refusal import Refusal, reason, some
from megatron.training.untrusted.links import file_in

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5_000_000_000
LONGEST = 100_000_000  # limit of a header in bytes, as in the library
DIMENSIONS = 64  # limit for a tensor
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
BYTES = {name: dtype.itemsize for dtype, name in NAMES.items()} | {"F8_E8M0": 1}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype in the format's spelling, and its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """The header of a file: its text, and the parsed contents."""

    text: str
    entries: dict[str, Entry]  # in the order of the data
    metadata: dict[str, str]

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return 8 + len(self.text.encode()) + max((entry.stop for entry in self.entries.values()), default=0)


def parse_header(text: str) -> Header:
    """Parse a header. Raises ValueError if it is invalid, or if its tensors overlap or leave gaps."""
    try:
        table = parse_json(text, unique=True)
        metadata = table.pop("__metadata__", {})
        entries = {name: _entry(**row) for name, row in table.items()}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("its header cannot be read") from None
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end = 0
    for name, entry in entries.items():
        size = math.prod(entry.shape) * BYTES.get(entry.dtype, 0)
        if entry.start != end or (entry.dtype in BYTES and entry.stop - entry.start != size):
            raise ValueError(f"its header gives a wrong place for {name}")
        end = entry.stop
    return Header(text, entries, metadata)


def _entry(dtype: Any, shape: Any, data_offsets: Any) -> Entry:
    """The entry of one tensor, from its row in the header. Raises ValueError or TypeError if the row is invalid."""
    start, stop = data_offsets
    if not isinstance(dtype, str) or not isinstance(shape, list) or len(shape) > DIMENSIONS:
        raise TypeError
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in (*shape, start, stop)) or stop < start:
        raise ValueError
    return Entry(dtype, tuple(shape), start, stop)


def make_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> Header:
    """A header for {name: (dtype, shape)}, the data in that order."""
    table: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * BYTES[dtype]
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False)
    return parse_header(text + " " * (-len(text.encode()) % 8))


def read_header(path: Path) -> Header:
    """The header of a file. Raises Refusal if the file is missing, truncated or invalid."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ValueError(f"it is truncated, or not a safetensors file ({size:,} bytes)")
            if length > LONGEST:
                raise ValueError(f"its header has {length:,} bytes, more than the limit of {LONGEST:,}")
            header = parse_header(file.read(length).decode())
    except FileNotFoundError:
        raise Refusal(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise Refusal(f"{path}: {reason(error)}") from None
    if header.size != size:
        word = "truncated" if size < header.size else "too long"
        raise Refusal(f"{path}: it is {word}: {size:,} bytes, {header.size:,} by its header")
    return header


def read_folder(checked: Checked) -> dict[str, Header]:
    """The headers of a model's files, by file name: of the single file, or of those that the index names.

    Raises:
        Refusal: files are missing or damaged, or contradict the index.
    """
    if SINGLE in checked.files:
        return {SINGLE: read_header(checked.file(SINGLE))}
    if INDEX not in checked.files:
        raise Refusal(f"{checked}: it has neither {SINGLE} nor {INDEX}; only the safetensors format is supported")
    index = checked.file(INDEX)
    try:
        places = parse_json(read_bytes(index), unique=True)["weight_map"]
        files = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Refusal(f"{index}: no weight_map can be read from it") from None
    if any(not isinstance(name, str) or Path(name).name != name or name in ("", "..") for name in files):
        raise Refusal(f"{index}: it names files outside of its folder")
    headers = {name: read_header(checked.file(name)) for name in files}
    actual = {tensor: name for name, header in headers.items() for tensor in header.entries}
    if actual != places or len(actual) != sum(len(header.entries) for header in headers.values()):
        differing = sorted(places.items() ^ actual.items()) or sorted(actual.items())
        raise Refusal(f"{index}: it contradicts the files about {differing[0][0]}")
    return headers


@contextmanager
def reading(checked: Checked, headers: Mapping[str, Header]) -> Iterator[Callable[[str], Tensor]]:
    """Yields a function that returns a tensor by name, from memory-mapped files."""
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        try:
            files = {name: stack.enter_context(safe_open(checked.file(name), framework="pt")) for name in headers}
        except (OSError, SafetensorError) as error:
            raise Refusal(f"{checked}: {error}") from None
        place = {tensor: files[name] for name, header in headers.items() for tensor in header.entries}
        yield lambda name: place[name].get_tensor(name)


@contextmanager
def writing(folder: Path, headers: Mapping[str, Header]) -> Iterator[Callable[[str, Tensor], None]]:
    """Yields a function that writes a tensor by name, in any order, into the files that ``headers`` describe.

    Raises:
        ValueError: a tensor has another dtype or shape than in its header, or has not been written at the end.
    """
    places = {tensor: name for name, header in headers.items() for tensor in header.entries}
    unwritten = set(places)
    with ExitStack() as stack:
        files = {}
        for name, header in headers.items():
            file, text = stack.enter_context(open(folder / name, "wb")), header.text.encode()
            files[name] = file, 8 + len(text)
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(header.size)

        def put(name: str, tensor: Tensor) -> None:
            file, begin = files[places[name]]
            entry = headers[places[name]].entries[name]
            if NAMES.get(tensor.dtype, entry.dtype) != entry.dtype or tuple(tensor.shape) != entry.shape:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, its header says {entry}")
            file.seek(begin + entry.start)
            file.write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))
            unwritten.discard(name)

        yield put
        if unwritten:
            raise ValueError(f"{len(unwritten)} tensors were not written, {min(unwritten)} among them")


def plan_files(tensors: Iterable[tuple[str, str, tuple[int, ...]]], limit: int = SHARD_BYTES) -> dict[str, Header]:
    """Distribute tensors (name, dtype, shape), in this order, over files of at most ``limit`` bytes of data each.

    Returns:
        {file name: header}.
    """
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    filled = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * BYTES[dtype]
        if groups[-1] and filled + size > limit:
            groups.append({})
            filled = 0
        groups[-1][name] = dtype, shape
        filled += size
    if len(groups) == 1:
        return {SINGLE: make_header(groups[0])}
    return {
        f"model-{number:05d}-of-{len(groups):05d}.safetensors": make_header(group)
        for number, group in enumerate(groups, 1)
    }


def index_json(headers: Mapping[str, Header]) -> dict[str, Any]:
    """The contents of model.safetensors.index.json."""
    total = sum(entry.stop - entry.start for header in headers.values() for entry in header.entries.values())
    places = {tensor: name for name, header in headers.items() for tensor in header.entries}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}


# Used by the conversions in both directions.
HEADERS = "safetensors_headers.json"  # in hf/: the headers of the original's files
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")  # a folder with one of them has a tokenizer
OTHERS = "other_tensors.safetensors"  # in hf/: the original's tensors that transformers ignores
# Files that are not copied: weights in any format, code, and files that this program writes.
NOT_COPIED = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx", ".py", HEADERS, CHECKSUMS)

Done = Callable[[], Any]  # called after each tensor, for a progress bar


def companions(folder: Path) -> list[Path]:
    """The files other than weights: config.json, generation_config.json, tokenizer, licence, index.

    Raises:
        Refusal: one of them is a link that leads out of the folder: its file would be published with the model.
    """
    paths = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.endswith(NOT_COPIED))
    return [file_in(folder, path.name) for path in paths]


def copy_files(files: list[Path], folder: Path) -> list[str]:
    """Copy the files into ``folder``; returns their names."""
    for path in files:
        shutil.copyfile(path, folder / path.name)
    return [path.name for path in files]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# The names of all files that a conversion writes; those that it copies are listed in COPIED while it runs.
COPIED = ".files_copied_by_conversion.json"
CONVERTED = ("*.safetensors", "config.json", "adapter_config.json", INDEX, HEADERS, TRACKER, COPIED, *WRITTEN)


@contextmanager
def new_folder(target: Path, copied: Iterable[Path] = ()) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to ``target`` at the end, or removed if an error occurs.

    At most one job writes a target. What an interrupted conversion has left is removed by the next one.

    Args:
        copied: files that may be copied into the folder.

    Raises:
        Refusal: another job writes the target; it exists and is not empty, or cannot be written. Nothing is left.
    """
    final = target.resolve()
    _check_new(target)
    with one_job(final) as owner:
        _check_new(target)  # again, because another job may have written it in the meantime
        partial, listed = Path(temporary_name(final, owner)), json.dumps([path.name for path in copied])
        try:
            for leftover in map(Path, unfinished(final)):
                _remove_converted(leftover)
            partial.mkdir()
            (partial / COPIED).write_text(listed)
            yield partial
            (partial / COPIED).unlink()
            sync_tree(partial)
            owner.check()
            partial.replace(final)
            sync_folders_up(final.parent)
        except OSError as error:
            raise Refusal(f"{target}: {reason(error)}; nothing was written") from error
        finally:
            if partial.is_dir():
                _remove_converted(partial, parse_json(listed))


def _check_new(target: Path) -> None:
    if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
        raise Refusal(f"{target}: it exists and is not empty; choose another folder, or remove it")


def _remove_converted(folder: Path, copied: Sequence[str] | None = None) -> None:
    """Remove an unfinished conversion. Other files in it stay, and are named on stderr."""
    try:
        listed = parse_json(read_bytes(folder / COPIED)) if copied is None else copied
        names = [escape(name) for name in listed if isinstance(name, str)]
    except (OSError, ValueError, TypeError):  # it was interrupted before it copied any
        names = []
    with suppress(OSError):
        if left := remove_made(folder, (*CONVERTED, *names)):
            print(f"{folder} is left: it has files that no conversion wrote: {some(left)}", file=sys.stderr)


@contextmanager
def one_process() -> Iterator[None]:
    """A process group of only this process, which megatron-core's checkpoints need."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn any error that core or torch raises for a damaged checkpoint into a Refusal of one line."""
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(f"checkpoint {path} cannot be read: {reason(error)}") from error


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A weight in ``dtype``. Raises Refusal if it has numbers that are too large for it."""
    result = tensor.to(dtype)
    narrower = dtype not in (tensor.dtype, torch.float32)
    if narrower and not torch.equal(result.isfinite(), tensor.isfinite()):
        raise Refusal(f"{name} has numbers that are too large for {dtype_name(dtype)}: give --dtype bf16 or fp32")
    return result


def dtype_name(dtype: torch.dtype) -> str:
    """bf16, fp16 or fp32."""
    return next(name for name, known in DTYPES.items() if known == dtype)
