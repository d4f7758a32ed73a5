# SPDX-License-Identifier: Apache-2.0
"""Limits of the formats of weights: files and objects just within them are read, others are refused."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any

import pytest
import torch

from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import DIMENSIONS, Entry, parse_header, read_header
from megatron.training.checkpoint.megatron_lm import torch_saved
from megatron.training.checkpoint.megatron_lm.pickle_machine import (
    DEEPEST,
    INTEGER_BYTES,
    KEY_PARTS,
    BadPickle,
    Machine,
    Table,
)
from megatron.training.checkpoint.megatron_lm.torch_saved import Storage, make_tensor
from megatron.training.checkpoint.megatron_lm.unpickle import read_bytes
from megatron.training.refusal import Refusal


def row(dtype: Any = "F32", shape: Any = (2, 3), at: Any = (0, 24), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": at, **more}


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"a": row()},
        {"a": row(), "__metadata__": {"format": "pt"}},
        {"b": row("I8", (4,), (24, 28)), "a": row()},  # in another order than the data
        {"a": row("BF16", (0, 5), (0, 0)), "b": row("F64", (), (0, 8))},
        {"a": row("U8", (1,) * DIMENSIONS, (0, 1))},
        {"a": row("F4", (3,), (0, 2))},  # a dtype that is not known here: its size is not checked
    ],
)
def test_headers_of_safetensors(header):
    parsed = parse_header(json.dumps(header))
    rows = {name: entry for name, entry in header.items() if name != "__metadata__"}
    assert parsed.entries == {
        name: Entry(one["dtype"], tuple(one["shape"]), *one["data_offsets"]) for name, one in rows.items()
    }
    places = [(entry.start, entry.stop) for entry in parsed.entries.values()]
    assert places == sorted(places) and parsed.metadata == header.get("__metadata__", {})


@pytest.mark.parametrize(
    "header, place",
    [
        ({"a": row(at=(4, 28))}, True),
        ({"a": row(at=(0, 20))}, True),
        ({"a": row(), "b": row("I8", (1,), (25, 26))}, True),
        ({"a": row(), "b": row("I8", (1,), (23, 24))}, True),
        ({"a": row(), "__metadata__": "pt"}, False),
        ({"a": row(), "__metadata__": {"format": 1}}, False),
        ({"a": row(dtype=4)}, False),
        ({"a": row(shape="23")}, False),
        ({"a": row("U8", (1,) * (DIMENSIONS + 1), (0, 1))}, False),
        ({"a": row("U8", (-1,), (0, 1))}, False),
        ({"a": row("U8", (True,), (0, 1))}, False),
        ({"a": row("F4", (2**62,), (0, 1))}, False),
        ({"a": row("F4", (1,), (2, 1))}, False),
        ({"a": row("F4", (1,), (0, 1, 2))}, False),
        ({"a": row(more=1)}, False),
        ({"a": [1]}, False),
        ([1], False),
    ],
)
def test_headers_of_safetensors_that_are_refused(header, place):
    message = "its header gives a wrong place for" if place else "its header cannot be read"
    with pytest.raises(ValueError, match=message):
        parse_header(json.dumps(header))


def test_files_of_safetensors(tmp_path, monkeypatch):
    path, header = tmp_path / "a.safetensors", json.dumps({"a": row("U8", (3,), (0, 3))}).encode()
    whole = struct.pack("<Q", len(header)) + header + b"abc"
    path.write_bytes(whole)
    assert read_header(path).size == len(whole) and [*read_header(path).entries] == ["a"]
    monkeypatch.setattr(safetensors_folder, "LONGEST", len(header))
    assert read_header(path).text == header.decode()
    monkeypatch.setattr(safetensors_folder, "LONGEST", len(header) - 1)
    with pytest.raises(Refusal, match="its header has .* bytes, more than the limit"):
        read_header(path)
    for bad, message in (
        (whole[:-1], "it is truncated: "),
        (whole + b"d", "it is too long: "),
        (whole[: 7 + len(header)], "it is truncated, or not a safetensors file"),
        (b"", "it is truncated, or not a safetensors file"),
        (bytes(7), "it is truncated, or not a safetensors file"),
    ):
        monkeypatch.undo()
        path.write_bytes(bad)
        with pytest.raises(Refusal, match=message):
            read_header(path)
    empty = struct.pack("<Q", 2) + b"{}"
    path.write_bytes(empty)  # only a header
    assert read_header(path).entries == {}


STORED = Storage(torch.arange(24, dtype=torch.uint8), torch.float32)  # six numbers


@pytest.mark.parametrize(
    "offset, size, stride, dtype, fits",
    [
        (0, (6,), (1,), None, True),
        (0, (2, 3), (3, 1), None, True),
        (5, (1,), (1,), None, True),
        (6, (1,), (1,), None, False),
        (0, (2,), (5,), None, True),
        (0, (2,), (6,), None, False),
        (3, (2, 2), (2, 1), None, False),
        (0, (7,), (0,), None, False),  # more elements than the storage has
        (0, (6,), (0,), None, True),
        (99, (0, 4), (4, 1), None, True),  # no elements
        (0, (), (), None, True),
        (0, (3,), (1,), torch.float64, True),
        (0, (4,), (1,), torch.float64, False),
        (-1, (1,), (1,), None, False),
        (0, (1,), (-1,), None, False),
        (0, (2, 2), (1,), None, False),
        (0, (2,), [1], None, False),
        (0, (2,), (1.0,), None, False),
        (True, (2,), (1,), None, False),
    ],
)
def test_tensors_lie_within_their_storage(offset, size, stride, dtype, fits):
    if not fits:
        with pytest.raises(torch_saved.BadPickle):
            make_tensor(STORED, offset, size, stride, dtype=dtype)
        return
    wanted = STORED.data.view(dtype or torch.float32)[offset if all(size) else 0 :].as_strided(size, stride)
    assert torch.equal(make_tensor(STORED, offset, size, stride, dtype=dtype), wanted)


@pytest.mark.parametrize("change", [{"hooks": {"a": 1}}, {"more": {"a": 1}}, {"storage": torch.zeros(6)}])
def test_tensors_with_anything_else_are_refused(change):
    arguments = {"storage": STORED, "offset": 0, "size": (6,), "stride": (1,), **change}
    with pytest.raises(torch_saved.BadPickle, match="a tensor in it is invalid"):
        make_tensor(**arguments)


def saved(change: Any = None) -> bytes:
    """A file of torch.save whose zip archive is written again by ``change``: (records, name -> ZipInfo) -> None."""
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(3.0)}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in change(records) if change else records:
            archive.writestr(name, data)
    return out.getvalue()


def doubled(records: list) -> list:
    return [*records, next(one for one in records if one[0].endswith("data/0"))]


def two_pickles(records: list) -> list:
    return [*records, ("other/data.pkl", records[0][1])]


def in_another_byte_order(records: list) -> list:
    return [(name, b"big" if name.endswith("byteorder") else data) for name, data in records]


def without_bytes(records: list) -> list:
    return [one for one in records if not one[0].endswith("data/0")]


def with_more_bytes(records: list) -> list:
    return [(name, data + b"\0" * 4 if name.endswith("data/0") else data) for name, data in records]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "change, message",
    [
        (doubled, "a record in it occurs twice"),
        (two_pickles, "it is not a file of torch.save"),
        (in_another_byte_order, "it has the byte order of another machine"),
        (without_bytes, "the bytes of a tensor in it are missing"),
        (with_more_bytes, "the bytes of a tensor in it do not match"),
    ],
)
def test_archives_of_torch_save(tmp_path, change, message):
    assert torch.equal(read_bytes(saved(), tmp_path / "x.pt", complete=True)["x"], torch.arange(3.0))
    with pytest.raises(Refusal, match=message):
        read_bytes(saved(change), tmp_path / "x.pt", complete=True)


# Pickles, which a machine executes without running code of the file. Instructions are those of pickletools.

PREFIX = b"\0" * 4000  # bytes before the pickle, which count for no limit


def loaded(pickle: bytes) -> Any:
    return Machine(PREFIX + pickle, Table({}, {}, {}), len(PREFIX)).load()


def refused(pickle: bytes, message: str) -> None:
    with pytest.raises(BadPickle, match=message):
        loaded(pickle)


def levels(x: Any) -> int:
    return 1 + max(map(levels, x), default=0) if isinstance(x, (list, tuple)) else 0


def test_levels_of_a_pickle_are_limited():
    for make in (lambda n: b"]" * n + b"a" * (n - 1) + b".", lambda n: b"N" + b"\x85" * n + b"."):  # lists, tuples
        assert levels(loaded(make(DEEPEST))) == DEEPEST
        refused(make(DEEPEST + 1), f"more than {DEEPEST} levels")
    marks = DEEPEST + 1
    assert loaded(b"(" * marks + b"1" * marks + b"N.") is None
    refused(b"(" * (marks + 1) + b"1" * (marks + 1) + b"N.", f"more than {DEEPEST} levels")


def test_parts_that_a_pickle_repeats_are_limited():
    """A list of 1000 parts is put into another one ``times``; each part counts, and each list too."""

    def repeated(times: int) -> bytes:
        return b"](" + b"N" * 1000 + b"eq\0000](" + b"h\0" * times + b"e."

    def parts(times: int) -> int:
        return 1 + times * (1 + 1 + 1000)

    most = max(n for n in range(1000) if parts(n) <= 100_000 + 16 * len(repeated(n)))
    assert len(loaded(repeated(most))) == most > 100
    refused(repeated(most + 1), "it repeats parts of itself too often")


def test_objects_of_a_pickle_are_limited_by_its_length():
    def objects(count: int) -> bytes:
        return b"]0" * count + b"N."

    most = max(n for n in range(5000) if n <= 1000 + len(objects(n)) // 4)
    assert 1900 < most < 2100 and loaded(objects(most)) is None
    refused(objects(most + 1), "more objects than fit into a file of this length")


def test_indices_of_the_memo_are_limited_by_the_length():
    length = len(PREFIX) + 7
    assert loaded(b"Nr" + struct.pack("<I", length) + b".") is None
    refused(b"Nr" + struct.pack("<I", length + 1) + b".", "an index of its memo is too large")


def test_keys_and_integers_of_a_pickle_are_short():
    def key(parts: int) -> bytes:
        return b"}(" + b"N" * parts + b"tNs."

    assert [*loaded(key(KEY_PARTS - 1))] == [(None,) * (KEY_PARTS - 1)] and loaded(b"}(tNs.") == {(): None}
    refused(key(KEY_PARTS), "a key in it is too long")
    refused(b"}]Ns.", "a key in it is not hashable")
    whole = b"\x8a" + bytes([INTEGER_BYTES]) + b"\1" * INTEGER_BYTES + b"."
    assert loaded(whole) == int.from_bytes(b"\1" * INTEGER_BYTES, "little")
    refused(b"\x8a" + bytes([INTEGER_BYTES + 1]) + b"\1" * (INTEGER_BYTES + 1) + b".", "an integer in it is too long")


@pytest.mark.parametrize(
    "module, name, harmful",
    [
        ("os", "system", True), ("os.path", "join", True), ("builtins", "eval", True), ("__builtin__", "exec", True),
        ("torch", "nn.Module", True), ("builtins", "set", False), ("torch", "eval", False), ("ossys", "system", False),
    ],
)  # fmt: skip
def test_names_that_could_run_code_are_refused(module, name, harmful):
    pickle = f"c{module}\n{name}\n.".encode()
    if harmful:
        refused(pickle, "which could run code")
    else:
        assert loaded(pickle).of == f"{module}.{name}"
