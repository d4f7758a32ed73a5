# SPDX-License-Identifier: Apache-2.0
"""Malicious files of checkpoints: each is refused with the reason, and has no effect."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import time
import zipfile
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.training.checkpoint.converting import to_hugging_face
from megatron.training.checkpoint.hugging_face import safetensors_folder
from megatron.training.checkpoint.hugging_face.safetensors_folder import HEADERS, companions
from megatron.training.checkpoint.megatron_lm import unpickle
from megatron.training.checkpoint.megatron_lm.stored_tensors import StoredTensors
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.config import DataConfig
from tests.fuzz.checkpoint_readers import (
    as_it_is,
    headers_json,
    language_model,
    random_state,
    saved,
    small_metadata,
    two_tensors,
)

MODULE = "torch.distributed.checkpoint.filesystem"
POPEN = "torch._strobelight.cli_function_profiler.subprocess.Popen"


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def call(module: str, name: str, argument: bytes) -> bytes:
    """Pickle instructions that call a function with one argument and discard what it returns."""
    return text(module) + text(name) + b"\x93" + argument + b"\x85R0"


def before(data: bytes, instructions: bytes) -> bytes:
    """Pickled data with other instructions inserted after the protocol header."""
    return data[:2] + instructions + data[2:]


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(Refusal) as refusal:
        unpickle.read_metadata(path)
    return str(refusal.value)


@pytest.mark.parametrize(
    "module, name",
    [
        (MODULE, POPEN),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch", "hub.os.system"),
        ("subprocess", "Popen"),
    ],
)
def test_names_in_metadata_are_not_looked_up(tmp_path, module, name):
    harm = tmp_path / "harm"
    words = b"](" + text("touch") + text(str(harm)) + b"e"
    data = before(small_metadata(), call(module, name, words))
    assert f"{name}, which could run code" in refused(tmp_path / ".metadata", data)
    assert not harm.exists()
    if name.endswith("Popen"):
        pickle.loads(data).storage_data  # noqa: B018
        deadline = time.monotonic() + 60
        while not harm.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert harm.exists()  # the plain unpickler runs it and returns valid metadata


def test_other_classes_of_known_modules_are_read_as_placeholders(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(before(small_metadata(), call(MODULE, "FileSystemWriter", text(str(tmp_path / "x")))))
    assert len(unpickle.read_metadata(path).storage_data) == 5
    assert os.listdir(tmp_path) == [".metadata"]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", "", "a/b", "a\nb", "a\x1b[2J"], ids=lambda name: repr(name)
)
def test_files_outside_of_the_folder_are_not_named(tmp_path, name):
    data = small_metadata().replace(b"\x8c\x0c__0_0.distcp", b"\x8c" + bytes([len(name)]) + name.encode())
    assert "names a file outside" in refused(tmp_path / ".metadata", data)


@pytest.mark.parametrize(
    "kind, message",
    [
        ("link", "leads out of its folder"),
        ("folder", "is not in checksums.json"),
        ("pipe", "is not a regular file"),
        ("short", "bytes, at least"),
        ("none", "no such file"),
    ],
)
def test_metadata_may_name_only_files_of_its_folder(tmp_path, kind, message):
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / ".metadata").write_bytes(two_tensors()[".metadata"])
    data, path = two_tensors()["__0_0.distcp"], folder / "__0_0.distcp"
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to("../elsewhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "short":
        path.write_bytes(data[:-1])
    with pytest.raises(Refusal, match=message):
        stored = StoredTensors(as_it_is(folder))
        [stored.read("weight", (0, 0), (4, 3)), stored.read("other", (0,), (5,)), stored.object("rng")]


def test_tensors_that_metadata_describes_are_read(tmp_path):
    for name, data in two_tensors().items():
        (tmp_path / name).write_bytes(data)
    stored = StoredTensors(as_it_is(tmp_path))
    assert stored.read("weight", (1, 0), (2, 3)).tolist() == [[3, 4, 5], [6, 7, 8]]
    result = stored.object("rng")["torch"]  # differs from the current state
    assert (result.dtype, result.shape) == (torch.uint8, random_state()["torch"].shape)


@pytest.mark.parametrize("stored", [torch.ones(2, 3).double(), torch.ones(2, 4), [torch.ones(2, 3)]])
def test_what_is_stored_must_be_the_tensor_of_the_metadata(tmp_path, monkeypatch, stored):
    for name, data in two_tensors().items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(unpickle, "read_bytes", lambda *_, **__: stored)
    with pytest.raises(Refusal, match="weight is not the tensor that .metadata describes"):
        StoredTensors(as_it_is(tmp_path)).read("weight", (0, 0), (4, 3))


def changed(**lengths: tuple[int, ...]) -> bytes:
    """The pickled metadata with other sizes of the tensor ``weight``."""
    metadata = pickle.loads(small_metadata())
    tensor = metadata.state_dict_metadata["weight"]
    if "size" in lengths:
        tensor.size = torch.Size(lengths["size"])
    if "chunk" in lengths:
        tensor.chunks[0].sizes = torch.Size(lengths["chunk"])
    if "length" in lengths:
        metadata.storage_data[MetadataIndex("weight", (0, 0))].length = lengths["length"][0]
    return pickle.dumps(metadata)


@pytest.mark.parametrize(
    "lengths, message",
    [
        ({"size": (1 << 31, 1 << 31)}, "larger than any tensor"),
        ({"chunk": (5, 3)}, "outside of the tensor"),
        ({"chunk": (2, 3, 1)}, "have different lengths"),
        ({"size": (1 << 40, 3), "chunk": (1 << 40, 3)}, "more elements than bytes"),
        ({"size": (1 << 14, 3), "chunk": (1 << 14, 3), "length": (3 << 14,)}, "more elements than bytes"),
        ({"length": (-1,)}, "length of an object"),
        ({"length": (1 << 70,)}, "length of an object"),
    ],
)
def test_sizes_that_contradict_the_bytes_are_refused(tmp_path, lengths, message):
    assert message in refused(tmp_path / ".metadata", changed(**lengths))


@pytest.mark.parametrize(
    "data, message",
    [
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "memo is too large"),
        (b"\x80\x04" + b"(" * 5000 + b".", "levels"),
        (b"\x80\x04" + b"]" * 200 + b"a" * 199 + b".", "levels"),
        (b"\x80\x04]" + b"".join(b"q%c0]h%ch%c\x86a" % (i, i, i) for i in range(80)) + b".", "repeats parts"),
        (b"\x80\x04}N" + b"".join(b"q%c0h%ch%c\x86" % (i, i, i) for i in range(80)) + b"Ns.", "repeats parts|too long"),
        (b"\x80\x04]q\x00h\x00a.", "contains itself"),
        (b"\x80\x04}q\x00Nh\x00s.", "contains itself"),
        (b"\x80\x04]q\x00h\x00\x85q\x010h\x00h\x01a.", "changes after"),
        (b"\x80\x04\x8e" + b"\xff" * 8 + b".", "too early"),
        (b"\x80\x04" + b"]" * 100_000 + b".", "more objects"),
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "does not occur in checkpoints"),
        (b"\x80\x04}]Ns.", "key in it"),
        (b"\x80\x04\x8c\x02\xff\xfe.", "damaged"),
        (b"", "too early"),
    ],
)
def test_work_and_memory_are_bounded_by_the_file(tmp_path, data, message):
    begin = time.process_time()
    line = refused(tmp_path / ".metadata", data)
    assert any(one in line for one in message.split("|")), line
    assert time.process_time() - begin < 2


def test_a_file_beyond_the_bound_is_not_read(tmp_path):
    with open(tmp_path / ".metadata", "wb") as file:
        file.truncate(1 << 40)
    begin = time.process_time()
    with pytest.raises(Refusal, match="more than"):
        unpickle.read_metadata(tmp_path / ".metadata")
    assert time.process_time() - begin < 1


# Files of torch.save


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before zip"])
def test_files_of_torch_save_are_read_as_torch_reads_them(tmp_path, zipped):
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    value = {
        "views": [base, base.t(), base[1:3, ::2], base.bfloat16(), torch.empty(0, 3), torch.tensor(3)],
        "model": language_model(),
        "random": random_state(),
        "python": random.getstate(),
        "plain": [1, -5, 2**100, 0.5, "é", b"\x00\xff", b"", None, True, (), {1, 2}, 1j, OrderedDict(a=1)],
        "numpy": [np.float64(2.5), np.arange(6).reshape(2, 3).T, np.zeros(3, ">i2"), np.ones((1,) * 32)],
        "dtype": torch.bfloat16,
        "args": Namespace(size=torch.Size([2]), path=Path("/a/b")),
    }
    data = saved(value, _use_new_zipfile_serialization=zipped)
    (tmp_path / "x.pt").write_bytes(data)
    theirs = torch.load(io.BytesIO(data), weights_only=False)
    read = unpickle.read_bytes(data, "x", complete=True), unpickle.read(tmp_path / "x.pt", mmap=True)
    for ours in read:
        assert vars(ours.pop("args")) == vars(theirs["args"])
        assert same(ours, {name: one for name, one in theirs.items() if name != "args"})
        ours["views"][0].add_(1)  # the tensors do not share memory with the file
        assert ours["views"][1].equal(ours["views"][0].t())
    assert (tmp_path / "x.pt").read_bytes() == data


def rewritten(data: bytes, packed: int = zipfile.ZIP_STORED, **records: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", packed) as new:
        for name in old.namelist():
            new.writestr(name, records.get(name.rpartition("/")[2].replace(".", "_"), old.read(name)))
    return file.getvalue()


def claiming(size: bytes, stride: bytes) -> bytes:
    """A file of torch.save whose tensor of four numbers claims another size and stride."""
    old = saved(torch.zeros(4))
    pickled = zipfile.ZipFile(io.BytesIO(old)).read("archive/data.pkl")
    new = pickled.replace(b"K\x04\x85", size + b"\x85", 1).replace(b"K\x01\x85", stride + b"\x85", 1)
    assert new != pickled
    return rewritten(old, data_pkl=new)


HUGE = b"\x8a\x06\x00\x00\x00\x00\x00\x01"  # 2^40


@pytest.mark.parametrize(
    "data, message",
    [
        (rewritten(saved(torch.zeros(1_000_000)), zipfile.ZIP_DEFLATED), "compressed"),
        (claiming(HUGE, b"K\x01"), "more elements than bytes"),
        (claiming(HUGE, b"K\x00"), "more elements than bytes"),
        (claiming(b"K\x04", HUGE), "more elements than bytes"),
        (saved(torch.zeros(4))[:-30], "damaged"),
        (b"PK\x03\x04", "damaged"),
        (b"", "too early"),
    ],
)
def test_tensors_lie_within_their_bytes(data, message):
    with pytest.raises(Refusal, match=message):
        unpickle.read_bytes(data, "x")


def test_a_call_that_would_allocate_is_not_made():
    """``torch.load(weights_only=True)`` makes this call, and takes 8 GB for it."""
    pickled = b"\x80\x02c__builtin__\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R."
    data = rewritten(saved(torch.zeros(4)), data_pkl=pickled)
    assert unpickle.read_bytes(data, "x").of == "__builtin__.bytearray"
    with pytest.raises(Refusal, match="__builtin__.bytearray does not belong in this file"):
        unpickle.read_bytes(data, "x", complete=True)


def test_parts_of_an_archive_do_not_overlap():
    data = bytearray(saved([torch.ones(100), torch.zeros(100)]))
    first, second = (data.index(b"archive/data/%d" % number) - 30 for number in (0, 1))
    entry = data.rindex(b"archive/data/1") - 46
    assert struct.unpack_from("<I", data, entry + 42)[0] in (second, 0xFFFFFFFF)
    struct.pack_into("<I", data, entry + 42, first)
    with pytest.raises(Refusal, match="overlap|damaged|lie within"):
        unpickle.read_bytes(bytes(data), "x")


# Settings of a model, headers, JSON


def test_a_header_that_is_longer_than_the_library_accepts_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((1 << 35).to_bytes(8, "little"))
        file.truncate(1 << 36)
    begin = time.process_time()
    with pytest.raises(Refusal, match="its header has 34,359,738,368 bytes"):
        safetensors_folder.read_header(path)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize("name", ["../harm.safetensors", "/tmp/harm.safetensors", "config.json", ""])
def test_stored_headers_may_name_only_files_in_the_new_folder(tmp_path, name):
    texts = json.loads(headers_json())
    texts[name] = texts.pop("a.safetensors")
    (tmp_path / HEADERS).write_text(json.dumps(texts))
    with pytest.raises(Refusal, match="names files outside"):
        to_hugging_face._headers(as_it_is(tmp_path), [], torch.float32, {}, lambda name: False)


def test_links_that_lead_out_of_a_checkpoint_are_refused(tmp_path):
    (tmp_path / "secret").write_text("a key")
    hf_folder = tmp_path / "c" / "hf"
    hf_folder.mkdir(parents=True)
    (hf_folder / "config.json").write_text("{}")
    assert companions(hf_folder) == [hf_folder / "config.json"]
    (hf_folder / "README.md").symlink_to("../../secret")
    with pytest.raises(Refusal, match="README.md is a link that leads out"):
        companions(hf_folder)
    with pytest.raises(Refusal, match="README.md is a link that leads out"):
        build_tokenizer(DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(hf_folder)), None)


def test_links_of_the_hubs_cache_are_read_and_no_others_next_to_it(tmp_path):
    model = tmp_path / "models--a--b"
    snapshot = model / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for place in (model / "blobs" / "ab12", model / "secret"):
        place.write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/ab12")
    assert companions(snapshot) == [snapshot / "config.json"] == [as_it_is(snapshot).file("config.json")]
    for number, target in enumerate(("../../secret", "../../../secret")):
        (snapshot / f"{number}.json").symlink_to(target)
        (tmp_path / "secret").write_text("{}")
        with pytest.raises(Refusal, match=f"{number}.json is a link that leads out"):
            as_it_is(snapshot).file(f"{number}.json")
