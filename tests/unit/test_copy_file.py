# SPDX-License-Identifier: Apache-2.0
"""The file that a rank's copy in memory is: whole or known not to be; and which checkpoints are the best."""

import json
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from megatron.training.checkpoint import checkpoint_folder
from megatron.training.checkpoint.in_memory import copy_file
from megatron.training.checkpoint.sharded_state import boxes
from tests.properties import examples

TENSORS = [
    ("bytes", torch.arange(7, dtype=torch.uint8)),
    ("number", torch.tensor(3.0)),
    ("columns", torch.arange(12.0).view(3, 4).t()),
    ("half", torch.randn(5).bfloat16()),
    ("none", torch.empty(0, 3)),
    ("long", torch.arange(3)),
]


def written(path):
    copy_file.write(path, TENSORS, {"iteration": "7"})
    assert not copy_file.intact(path)
    assert copy_file.seal(path) == path.stat().st_size
    return path


def test_any_reader_of_safetensors_reads_it(tmp_path):
    path = written(tmp_path / "a")
    assert copy_file.intact(path) and copy_file.about(path)["iteration"] == "7"
    found = load_file(path)
    assert found.keys() == dict(TENSORS).keys()
    for name, tensor in TENSORS:
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_no_flipped_bit_and_no_missing_end_goes_unseen(tmp_path):
    path = written(tmp_path / "a")
    data = path.read_bytes()
    about_sum = data.index(copy_file.FIELD)
    for at in {*range(0, len(data), 5), *range(about_sum, about_sum + 20), len(data) - 1}:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert not copy_file.intact(path), at
    for size in (0, 4, 8, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert not copy_file.intact(path) and not copy_file.about(path)
    assert not copy_file.intact(tmp_path / "b") and copy_file.about(tmp_path / "b") == {}


@examples(60)
@given(st.data())
def test_boxes_are_the_elements_in_their_order(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    whole = torch.arange(prod(shape)).view(shape)
    start = data.draw(st.integers(-3, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel() + 3))
    found = list(boxes(shape, start, stop))
    for first, corner, inner in found:
        part = whole[tuple(slice(at, at + size) for at, size in zip(corner, inner))]
        assert part.shape == inner and part.flatten().tolist() == list(range(first, first + prod(inner)))
    assert sum(prod(inner) for _, _, inner in found) == max(0, min(stop, whole.numel()) - max(start, 0))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def checkpoints(folder, losses):
    """Empty checkpoints 10, 20, ... with such validation losses."""
    for number, loss in enumerate(losses, start=1):
        path = folder / f"iter_{10 * number:07d}"
        path.mkdir()
        if loss is not None:
            (path / checkpoint_folder.VALIDATION).write_text(
                loss if isinstance(loss, str) else json.dumps({"validation_loss": loss})
            )


@pytest.mark.parametrize(
    "losses, keep, multiple, best, stay",
    [
        ([3.0, 1.0, 2.0, 4.0], 1, None, 1, [20, 40]),
        ([3.0, 1.0, 2.0, 4.0], 2, None, 2, [20, 30, 40]),
        ([3.0, 1.0, 2.0, 0.5], 1, None, 1, [40]),
        ([3.0, 1.0, 2.0, 0.5], 1, 30, 2, [20, 30, 40]),
        ([1.0, 1.0, 2.0], 1, None, 1, [20, 30]),  # of equals the later
        ([float("nan"), None, "torn", "[]", 5.0], 1, None, 3, [50]),
        ([1.0, 2.0, 3.0], 1, None, None, [30]),
    ],
)
def test_the_best_stay(tmp_path, losses, keep, multiple, best, stay):
    checkpoints(tmp_path, losses)
    checkpoint_folder.remove_older(tmp_path, 10 * len(losses), keep, multiple, best)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"iter_{iteration:07d}" for iteration in stay]
