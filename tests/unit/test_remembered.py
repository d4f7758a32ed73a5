# SPDX-License-Identifier: Apache-2.0
"""Operations on fake tensors, answered from memory: the same as PyTorch's own answer, and a new tensor each time."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron.platform.simulated_cluster import UNKNOWN, Collectives, Remembered, fake_tensors

aten = torch.ops.aten

OPERATIONS = {
    "sum": lambda x: x + x,
    "other dtype": lambda x: x.to(torch.float32),
    "view of rows": lambda x: x[2:5],
    "view of a view": lambda x: x[1:].permute(1, 0, 2)[:, 3:],
    "views of views that begin elsewhere": lambda x: (x[1][2:], x[3][2:]),
    "several views": lambda x: x.unbind(0),
    "several tensors": lambda x: aten._scaled_dot_product_flash_attention(*[x[None].permute(0, 2, 1, 3)] * 3)[:2],
    "numbers": lambda x: torch.full((3, x.size(1)), 1.0),
}


def told(out):
    """All that may be asked of tensors, and which of them share memory."""
    tensors = [out] if isinstance(out, torch.Tensor) else list(out)
    storages = [x.untyped_storage() for x in tensors]
    return [
        (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, s.nbytes(), str(torch._C._dispatch_key_set(x)))
        for x, s in zip(tensors, storages)
    ], [[a._cdata == b._cdata for a in storages] for b in storages]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_answer_from_memory_is_what_pytorch_answers(name, monkeypatch):
    asked = []
    with fake_tensors():
        # Fake tensors of two shapes, one after another: what is remembered of one is none of the other's.
        x, y = (torch.empty(8, rows, 16, dtype=torch.bfloat16) for rows in (8, 12))
        run = OPERATIONS[name]
        with monkeypatch.context() as without:
            without.setattr(Remembered, "answer", lambda *_: UNKNOWN)
            without.setattr(Remembered, "keep", lambda *_: None)
            expected = [told(run(z)) for z in (x, y)]
        first = [run(z) for z in (x, y)]
        keep = Remembered.keep
        monkeypatch.setattr(Remembered, "keep", lambda *args: (asked.append(args[1]), keep(*args)))
        second = [run(z) for z in (x, y)]
    assert not asked  # all were known
    assert [told(out) for out in first] == [told(out) for out in second] == expected
    for a, b in zip(first, second):
        for p, q in zip(*([z] if isinstance(z, torch.Tensor) else z for z in (a, b))):
            assert p is not q and isinstance(q, FakeTensor)
            shares = p.untyped_storage()._cdata == q.untyped_storage()._cdata
            assert shares == ("view" in name)


def test_slices_of_equal_sizes_are_one_question(monkeypatch):
    """Their answers begin elsewhere, and end where the tensor does."""
    asked, keep = [], Remembered.keep
    cuts = [(0, 2), (1, 3), (4, 6), (-3, -1), (6, 100), (5, 7), (7, 100), (3, 4), (7, 3), (8, 9)]

    def found():
        return [(x[a:b].shape, x[a:b].stride(), x[a:b].storage_offset()) for x in (y, y[1:]) for a, b in cuts]

    with fake_tensors():
        y = torch.empty(8, 3, 4)
        monkeypatch.setattr(Remembered, "keep", lambda *args: (asked.append(args[1]), keep(*args)))
        answered = found()
    assert asked.count(aten.slice.Tensor) <= 8  # of each tensor: three sizes and the tensor's beginning
    assert answered == [
        (x[a:b].shape, x[a:b].stride(), x[a:b].storage_offset())
        for z in [torch.empty(8, 3, 4)]
        for x in (z, z[1:])
        for a, b in cuts
    ]


def test_numbers_of_other_types_are_other_questions():
    with fake_tensors():
        x = torch.empty(4, dtype=torch.int64)
        for _ in range(2):
            found = [(x + number).dtype for number in (1, 1.0, True)]
    assert found == [torch.int64, torch.float32, torch.int64]


def test_what_does_more_than_return_tensors_is_asked_each_time():
    with fake_tensors() as answer:
        assert isinstance(answer.__self__, Collectives)
        x = torch.empty(8)
        for _ in range(2):
            storage = x.untyped_storage()
            storage.resize_(0)
            storage.resize_(32)
            x.resize_(4)
            x.resize_(8)
            assert x.shape == (8,)
            assert answer(aten.resize_.default, (x, [4]), {}) is UNKNOWN
