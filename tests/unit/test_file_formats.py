# SPDX-License-Identifier: Apache-2.0
"""Limits of the formats of weights: files and objects just within them are read, others are refused."""

from __future__ import annotations

import io
import json
import mmap
import pickle
import struct
import zipfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import PosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import DIMENSIONS, Entry, parse_header, read_header
from megatron.training.checkpoint.megatron_lm import checked, metadata_file, places, torch_saved, unpickle
from megatron.training.checkpoint.megatron_lm.pickle_machine import (
    DEEPEST,
    INTEGER_BYTES,
    KEY_PARTS,
    BadPickle,
    Machine,
    Table,
    Unread,
)
from megatron.training.checkpoint.megatron_lm.stored_tensors import overlap
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
        ({"a": row(shape=(1.0,))}, False),
        ({"a": row("U8", (-1,), (0, -4))}, False),
        ({"a": row(shape=(1 << 40,) * 60)}, True),
        ({"a": row(shape=(1,) * 100_000)}, False),
        ({"a": [1]}, False),
        ([1], False),
        (f'{{"a":{json.dumps(row())},"a":{json.dumps(row())}}}', False),
        ("[" * 100_000, False),
        ('{"a":' + "9" * 100_000 + "}", False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_headers_of_safetensors_that_are_refused(header, place):
    message = "its header gives a wrong place for" if place else "its header cannot be read"
    with pytest.raises(ValueError, match=message):
        parse_header(header if isinstance(header, str) else json.dumps(header))


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
        (struct.pack("<Q", 1 << 60) + b"{}", "it is truncated, or not a safetensors file"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "utf-8"),
    ):
        monkeypatch.undo()
        path.write_bytes(bad)
        with pytest.raises(Refusal, match=message):
            read_header(path)
    path.write_bytes(bytes(8))  # a header of no bytes
    with pytest.raises(Refusal, match="its header cannot be read"):
        read_header(path)
    empty = struct.pack("<Q", 2) + b"{}"
    path.write_bytes(empty)  # only a header
    assert read_header(path).entries == {}


def test_headers_are_padded_to_whole_words():
    for number in range(1, 10):
        text = safetensors_folder.make_header({"\u00e9" * number: ("F32", (3,))}).text
        assert len(text.encode()) % 8 == 0 and len(text.rstrip()) > len(text) - 8


@pytest.mark.parametrize("tensor", [torch.zeros(3, dtype=torch.float16), torch.zeros(4), torch.zeros(3, 1)])
def test_only_what_the_header_says_is_written(tmp_path, tensor):
    header = safetensors_folder.make_header({"a": ("F32", (3,))})
    with safetensors_folder.writing(tmp_path, {"a.safetensors": header}) as put:
        with pytest.raises(ValueError, match="its header says"):
            put("a", tensor)
        put("a", torch.arange(3.0))
    assert (tmp_path / "a.safetensors").read_bytes().endswith(np.arange(3, dtype=np.float32).tobytes())


def test_files_hold_as_many_tensors_as_fit():
    tensors = [("a", "F32", (2,)), ("b", "BF16", (4,)), ("c", "U8", (9,)), ("d", "F64", (3,)), ("e", "U8", (8,))]
    files = safetensors_folder.plan_files(tensors, limit=16)
    assert [[*header.entries] for header in files.values()] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [*files][0] == "model-00001-of-00004.safetensors"
    assert [*safetensors_folder.plan_files(tensors, limit=57)] == ["model.safetensors"]  # 8 + 8 + 9 + 24 + 8
    assert len(safetensors_folder.plan_files(tensors, limit=56)) == 2


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


def with_a_short_id(records: list) -> list:
    return [(name, data.replace(b"K\x03t", b"t") if name.endswith("pkl") else data) for name, data in records]


def with_long_names(records: list) -> list:
    return [("a" * 300 + name[name.index("/") :], data) for name, data in records]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "change, message",
    [
        (with_a_short_id, "it refers to an object outside of the file"),
        (doubled, "a record in it occurs twice"),
        (two_pickles, "it is not a file of torch.save"),
        (in_another_byte_order, "it has the byte order of another machine"),
        (without_bytes, "the bytes of a tensor in it are missing"),
        (with_more_bytes, "the bytes of a tensor in it do not match"),
    ],
)
def test_archives_of_torch_save(tmp_path, change, message):
    for good in (saved(), saved(with_long_names)):
        assert torch.equal(read_bytes(good, tmp_path / "x.pt", complete=True)["x"], torch.arange(3.0))
    with pytest.raises(Refusal, match=message):
        read_bytes(saved(change), tmp_path / "x.pt", complete=True)


def patched(data: bytes, offset: int, number: int) -> bytes:
    """The archive with a number of 4 bytes in the list entry of its tensor changed."""
    at = max(
        place for place in range(len(data)) if data.startswith(b"PK\1\2", place) and b"data/0" in data[place:][:99]
    )
    return data[: at + offset] + struct.pack("<I", number) + data[at + offset + 4 :]


def test_compressed_archives_are_refused(tmp_path):
    where, message = tmp_path / "x.pt", "it is compressed, which torch.save never does"
    for bad in (patched(saved(), 20, 11), patched(saved(), 10, zipfile.ZIP_DEFLATED)):  # another size, or a method
        with pytest.raises(Refusal, match=message):
            read_bytes(bad, where, complete=True)


def older(x: Any) -> bytes:
    torch.save(x, buffer := io.BytesIO(), _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def test_files_of_older_versions_of_torch(tmp_path):
    where, tensor = tmp_path / "x.pt", torch.arange(3, dtype=torch.uint8)
    data = older({"x": tensor, "none": torch.empty(0), "y": torch.arange(5.0).double()})
    read = read_bytes(data, where, complete=True)
    assert torch.equal(read["x"], tensor) and not read["none"].numel()
    assert torch.equal(read["y"], torch.arange(5.0).double())
    data, end = older(tensor), 8 + 3
    assert torch.equal(read_bytes(data, where, complete=True), tensor)
    for bad in (data[:-1], data[:-3], data[:-end], data[:-end] + struct.pack("<Q", 3 + 2**56) + data[-3:]):
        with pytest.raises(Refusal, match="it ends too early"):
            read_bytes(bad, where, complete=True)

    def claiming(size: int) -> bytes:
        place = data.rindex(b"K\x03N")  # the number of bytes of the storage in the pickle
        return data[:place] + b"J" + struct.pack("<i", size) + data[place + 2 :]

    whole = len(claiming(0))
    for size, message in ((whole, "it ends too early"), (whole + 1, "its tensors have more bytes than the file")):
        with pytest.raises(Refusal, match=message):
            read_bytes(claiming(size), where, complete=True)


def with_another_dtype(records: list) -> list:
    kind = b"torch._utils\n_rebuild_tensor_v2"
    return [(name, data.replace(b"torch\nFloatStorage", kind)) for name, data in records]


def with_a_negative_length(records: list) -> list:
    change = b"J" + struct.pack("<i", -3)
    return [(name, data.replace(b"K\x03t", change + b"t") if name.endswith("pkl") else data) for name, data in records]


@pytest.mark.parametrize("change", [with_another_dtype, with_a_negative_length])
def test_storages_have_a_dtype_and_a_length(tmp_path, change):
    with pytest.raises(Refusal, match="the dtype of a tensor in it is unknown"):
        read_bytes(saved(change), tmp_path / "x.pt", complete=True)


def test_all_kinds_of_tensors_are_read_as_plain_ones(tmp_path):
    with_note = torch.arange(3.0)
    with_note.note = "x"
    parameter = nn.Parameter(torch.arange(3.0))
    noted = nn.Parameter(torch.arange(3.0))
    noted.note = "x"
    for x in (with_note, parameter, noted, torch.tensor([1, 2**15], dtype=torch.uint16)):
        torch.save(x, buffer := io.BytesIO())
        read = read_bytes(buffer.getvalue(), tmp_path / "x.pt", complete=True)
        assert type(read) is torch.Tensor and torch.equal(read, x.detach()) and not read.requires_grad


MAKER = Unread("torch._utils._rebuild_tensor_v2")
WHOLE = (STORED, 0, (6,), (1,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch_saved._parameter(STORED, True, None),
        lambda: torch_saved._parameter(torch.ones(2), True, {"a": 1}),
        lambda: torch_saved._tensor_with_dtype(*WHOLE, False, None, "torch.float32"),
        lambda: torch_saved._of_type("torch._utils._rebuild_tensor_v2", None, WHOLE, None),
        lambda: torch_saved._of_type(MAKER, None, [*WHOLE], None),
        lambda: torch_saved._of_type(Unread("os.system"), None, WHOLE, None),
    ],
)
def test_kinds_of_tensors_that_are_refused(make: Callable[[], Any]):
    assert torch_saved._of_type(MAKER, None, WHOLE, None).shape == (6,)
    assert torch_saved._tensor_with_dtype(*WHOLE, False, None, torch.float32).shape == (6,)
    with pytest.raises(BadPickle):
        make()


def test_files_are_mapped_if_asked_and_not_empty(tmp_path):
    path = tmp_path / "x"
    path.touch()
    assert unpickle._file(path, True) == unpickle._file(path, False) == bytearray()
    path.write_bytes(b"abc")
    assert isinstance(unpickle._file(path, True), mmap.mmap) and unpickle._file(path, False) == bytearray(b"abc")


ORDER = (3, "<", None)
F4 = unpickle._ArrayType("f4")


@pytest.mark.parametrize(
    "make, good, bad",
    [
        (unpickle._path, [("a", "b"), ("/a",)], [("a\0b",), (1,), ("a", b"b")]),
        (unpickle._device, [("cpu",), ("cuda", 0), ("meta", None)], [("disk",), ("cpu", "0"), (0, 0), ("cuda", True)]),
        (unpickle._encoded, [("a",), ("\xff", "latin1")], [(b"a",), ("a", "utf8")]),
        (unpickle._set_of, [([1, "a"],), ([],)], [((1,),), ([[1]],), ({1},), ()]),
        (unpickle._complex, [(1.0, 2.0)], [(1, 2.0), (1.0, 2), ("1", "2")]),
        (unpickle._ArrayType, [("f4",), ("b1", False, True)], [("O",), ("V8",), (4,)]),
        (F4.set_order, [((3, "<"),), ((3, "|", 1),)], [((3,),), ([3, "<"],), ((3, "!"),)]),
        (unpickle._Recipe().set_state, [({"a": 1},), ({},)], [([("a", 1)],), ({1: 1},), ({"__class__": 1},)]),
        (
            partial(unpickle._build_namespace, Namespace()),
            [({"a": 1},), ({},)],
            [([("a", 1)],), ({1: 1},), ({"a": 1, 2: 3},)],
        ),
        (unpickle._array_number, [(F4, b"1234")], [(F4, b"123"), ("f4", b"1234"), (F4, "1234")]),
        (
            lambda state: unpickle._fill_array(np.empty(0, np.int8), state),
            [((1, (2,), F4, False, bytes(8)),), ((1, (), F4, True, bytes(4)),)],
            [([1, (2,), F4, False, bytes(8)],), ((1, (2,), F4, False),), ((1, (2,), F4, False, bytes(7)),),
             ((1, (2,), "f4", False, bytes(8)),), ((1, (2,), F4, 0, bytes(8)),), ((1, [2], F4, False, bytes(8)),),
             ((1, (-2,), F4, False, bytes(8)),), ((1, (2,), F4, False, "12345678"),)],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_plain_objects_of_a_checkpoint(make: Callable[..., Any], good: list[tuple], bad: list[tuple]):
    for arguments in good:
        make(*arguments)
    for arguments in bad:
        with pytest.raises(BadPickle):
            make(*arguments)
    assert unpickle._path("/a", "b") == PosixPath("/a/b") and unpickle._set_of([1, 1]) == {1}


# torch's .metadata


def test_numbers_and_shapes_of_metadata():
    whole, most = metadata_file.whole_number, metadata_file.LARGEST
    assert whole(0) and whole(most - 1)
    assert not any(map(whole, (-1, most, True, 1.0, "1", None)))
    longest = (1,) * metadata_file.DIMENSIONS
    assert metadata_file.make_size(longest) == torch.Size(longest)
    for bad in ((*longest, 1), (-1,), "11", (2**31, 2**31)):
        with pytest.raises(BadPickle, match="a shape in it is"):
            metadata_file.make_size(bad)


def metadata(length: int, **more: Any) -> Metadata:
    """The list of one tensor of 2 x 3 numbers in fp32, which has ``length`` bytes in a file."""
    offset = torch.Size(more.get("offset", (0, 0)))
    size, index = torch.Size(more.get("size", (2, 3))), MetadataIndex("a", offset)
    chunk = ChunkStorageMetadata(offset, torch.Size((2, 3)))
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), size, more.get("chunks", list)([chunk]))
    return Metadata({"a": tensor}, None, {index: _StorageInfo(more.get("name", "b.distcp"), 0, length)})


def test_metadata_of_torch(tmp_path, monkeypatch):
    path = tmp_path / ".metadata"
    path.write_bytes(data := pickle.dumps(metadata(24)))
    assert metadata_file.read_metadata(path).state_dict_metadata["a"].size == (2, 3)
    monkeypatch.setattr(metadata_file, "LONGEST", len(data))
    metadata_file.read_metadata(path)
    monkeypatch.setattr(metadata_file, "LONGEST", len(data) - 1)
    with pytest.raises(Refusal, match="it has more than"):
        metadata_file.read_metadata(path)
    monkeypatch.undo()
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    for bad, message in (
        (pickle.dumps(metadata(23)), "a has more elements than bytes for them"),
        (pickle.dumps(metadata(24, name="../b")), "it names a file outside of its folder"),
        (pickle.dumps(metadata(24, chunks=tuple)), "chunks of an object in it has a wrong type or value"),
        (pickle.dumps(metadata(24, size=(2, 3, 1))), "a part of a tensor in it lies outside of the tensor"),
        (pickle.dumps(metadata(24, size=(2, 2))), "a part of a tensor in it lies outside of the tensor"),
        (pickle.dumps(metadata(24, offset=(1, 0))), "a part of a tensor in it lies outside of the tensor"),
        (pickle.dumps(3), "it is not a list of tensors"),
        (b"c" + name + b")\x81.", "it is not a list of tensors"),
    ):
        path.write_bytes(bad)
        with pytest.raises(Refusal, match=message):
            metadata_file.read_metadata(path)


def test_the_common_state_is_a_dictionary_with_names(tmp_path):
    for state, message in (
        ({"config": {"model": {}}, "progress": {}}, None),
        ({"args": 1}, None),
        ({"config": {"model": {"num_layers": "2"}}}, "num_layers '2' is not a value for --num-layers"),
        ({"config": {"model": {"num_layers": 10**9}}}, "more than 10,000"),
        ({"config": {"model": {"hidden_size": -1}}}, "hidden_size"),
        ({"config": {"model": {"norm_epsilon": float("nan")}}}, "norm_epsilon"),
        ({"config": {"model": {}}, "progress": {"iteration": [1]}}, "iteration"),
        ({"vocab_size": 1.5}, "vocab_size"),
        ([], "common.pt does not contain a dictionary of a checkpoint's state"),
        ({1: 2}, "common.pt does not contain a dictionary of a checkpoint's state"),
        ({"config": {"model": []}}, "common.pt holds no settings of its run"),
        ({"config": []}, "common.pt holds no settings of its run"),
        ({"config": {}, "progress": []}, "does not contain the progress of its run"),
    ):
        torch.save(state, tmp_path / "common.pt")
        if message is None:
            assert checked.read_common(tmp_path) == state
        else:
            with pytest.raises(Refusal, match=message):
                checked.read_common(tmp_path)


def test_numbers_of_a_common_state_have_limits():
    most = checked.LARGEST
    assert checked._is_count(0) and checked._is_count(most - 1) and not checked._is_count(most)
    assert not any(map(checked._is_count, (-1, True, 1.0, "1")))
    assert checked._number(-1) and checked._number(1.5) and checked._number(most - 1)
    assert not any(map(checked._number, (most, -most, float("inf"), float("nan"), True, "1")))


def test_a_file_of_a_checkpoint_without_sums_must_be_there(tmp_path):
    """Messages name the file."""
    (tmp_path / "common.pt").write_bytes(saved())
    with pytest.raises(FileNotFoundError, match="__0_0.distcp"):
        checked._torch_dist(tmp_path, 0, 1, ["__0_0.distcp"])
    with pytest.raises(Refusal, match=f"{tmp_path / '.metadata'} cannot be read"):
        (tmp_path / ".metadata").write_bytes(b"x")
        checked.files_of(tmp_path)


def test_a_compressed_or_huge_archive_is_damaged(tmp_path):
    for data in (patched(saved(), 10, zipfile.ZIP_DEFLATED), patched(saved(), 24, 2**30)):
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(checked.Damaged, match="is not what was written"):
            checked.check_torch_file(tmp_path / "a")


def test_names_of_checkpoints_have_at_most_15_digits(tmp_path):
    for digits in (1, 7, 15, 16):
        (tmp_path / f"iter_{'1' * digits}").mkdir()
    (tmp_path / "iter_0000010.bak").mkdir()
    (tmp_path / "iter_0000012").touch()
    assert [*places.checkpoints_in(tmp_path)] == [1, 1111111, 111111111111111]
    tracker = tmp_path / places.TRACKER
    for text, good in (("1" * 15, True), ("1" * 16, False), ("-1", False), ("\u0661", False)):
        tracker.write_text(text)
        if good:
            assert places._latest(tmp_path, False, []) == f"iter_{text}"
        else:
            with pytest.raises(Refusal, match="which is neither an iteration nor release"):
                places._latest(tmp_path, False, [])
    tracker.write_text("x" * 200)
    assert places.name_in(tracker) == "x" * 200
    tracker.write_text("x" * 201)
    with pytest.raises(Refusal):
        places.name_in(tracker)


def test_blocks_that_only_touch_have_nothing_in_common():
    assert overlap((0, 0), (5, 2), (5, 0), (3, 2)) is None and overlap((4,), (2,), (0,), (4,)) is None
    assert overlap((0, 0), (5, 2), (4, 1), (3, 2)) == [(4, 5), (1, 2)]


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


def repeated(parts: int, times: int) -> bytes:
    """A list of so many parts, which is put into another one so many times."""
    return b"](" + b"N" * parts + b"eq\0000](" + b"h\0" * times + b"e."


def room(parts: int, times: int) -> int:
    """How many more parts the limit allows; each part counts, and each list too."""
    return 100_000 + 16 * len(repeated(parts, times)) - (1 + times * (1 + 1 + parts))


def test_parts_that_a_pickle_repeats_are_limited():
    some = ((parts, times) for parts in range(500, 3000) for times in range(250))
    parts, most = next(pair for pair in some if room(*pair) == 0)
    assert len(loaded(repeated(parts, most))) == most > 20
    refused(repeated(parts, most + 1), "it repeats parts of itself too often")


def test_objects_that_hold_their_arguments_count_as_levels():
    table = Table({}, {("module", "Name"): lambda x: [x]}, {})
    for count in (DEEPEST - 1, DEEPEST, DEEPEST + 1):
        pickle = b"cmodule\nName\n" * count + b"N" + b"\x85R" * count + b"."
        if count <= DEEPEST:
            assert levels(Machine(PREFIX + pickle, table, len(PREFIX)).load()) == count
        else:
            with pytest.raises(BadPickle, match=f"more than {DEEPEST} levels"):
                Machine(PREFIX + pickle, table, len(PREFIX)).load()


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


ALL_KINDS = {"a": [(1, 2, 3, 4), "x", 2**70, -1.5, True, None, (), 300], 3: {"b": [[], {}]}}
OBJECT = b"cmodule\nName\n)R"  # an object of a class that is not known here


@pytest.mark.parametrize(
    "pickle, value",
    [
        (b"](K\1K\2K\3K\4K\5\x86e.", [1, 2, 3, (4, 5)]),
        (b"](K\1K\2K\3K\4\x87e.", [1, (2, 3, 4)]),
        (b"](K\1K\2K\3K\4\x85e.", [1, 2, 3, (4,)]),
        (b"(K\1K\2K\1\x91.", frozenset((1, 2))),
        (b"\x8f(K\1K\2\x90.", {1, 2}),
        (pickle.dumps([frozenset((1, 2)), {3}, b"x"], 4), [frozenset((1, 2)), {3}, b"x"]),
        (b"\x8f(K\1\x90(K\2\x90.", {1, 2}),
        (b"}(K\1K\2K\3K\4u.", {1: 2, 3: 4}),
        (b"]K\1aK\2a.", [1, 2]),
        (b"J\xff\xff\xff\xff.", -1),
        (b"\x8a\1\xff.", -1),
        *((pickle.dumps(ALL_KINDS, protocol), ALL_KINDS) for protocol in (2, 3, 4)),
    ],
)
def test_instructions_of_a_pickle(pickle, value):
    assert loaded(pickle) == value


def test_a_pickle_ends_with_its_only_object():
    refused(b"N", "it ends too early")
    refused(b"NN.", "its stack is not empty at the end")
    refused(b"N(N.", "its stack is not empty at the end")
    refused(b"\x88", "it ends too early")


def test_what_is_put_into_unknown_objects_is_left_out():
    for more in (b"(NNu.", b"NNs.", b"(Ne.", b"Na.", b"Nb."):
        assert loaded(OBJECT + more).of == "module.Name"
    refused(b"]NNs.", "it puts keys into an object that is not a dictionary")
    refused(b"}(NNNu.", "a key in it has no value")
    refused(b"}Na.", "it puts items into an object that is not a list")
    refused(b"NNa.", "it puts items into an object that is not a list")
    refused(b"]Nb.", "it gives a state to a list")


def test_names_in_a_pickle():
    assert loaded(b"c\nName\n.").of == ".Name" and loaded(b"cmodule\n\n.").of == "module."
    longest = b"m" * 499
    assert loaded(b"c" + longest + b"\nName\n.").of == f"{longest.decode()}.Name"
    refused(b"cm" + longest + b"\nName\n.", "a name in it does not end")
    assert loaded(b"\x8c\1m\x8c\1n\x93.").of == "m.n"
    refused(b"N\x8c\1n\x93.", "a name in it is not a string")
    refused(b"\x8c\1mN\x93.", "a name in it is not a string")
    refused(b"cm\nn\n]R.", "arguments in it are not a tuple")
    refused(b"])R.", "it calls an object that is not a name")
