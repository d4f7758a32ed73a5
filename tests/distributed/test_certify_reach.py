# SPDX-License-Identifier: Apache-2.0
"""certify and the parallelism of torch: right programs pass on 2 and 4 ranks, planted errors are noticed and placed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatron.context_parallel as cp
from megatron.certifying.of_torch.whole import modules, parameters
from tests.reach import PLACES, PROGRAMS, Step


@pytest.mark.parametrize("name", [n if n == "fsdp2" else pytest.param(n, marks=pytest.mark.full) for n in PROGRAMS])
def test_a_right_program_of_torch_is_not_accused(pool, name: str) -> None:
    certificate = cp.certify(Step(name), [2, 4], run=pool.run)
    assert certificate.right, str(certificate)


@pytest.mark.full
@pytest.mark.parametrize("name, error", PLACES)
def test_an_error_planted_in_a_program_of_torch_is_placed(pool, name: str, error: str) -> None:
    certificate = cp.certify(Step(name, error), [2], run=pool.run)
    place = certificate.grids[0].place
    assert place is not None, str(certificate)
    kind, module = PLACES[name, error]
    assert (place.kind, place.modules[0]) == (kind, module), str(certificate)


def test_wrappers_do_not_change_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"module": nn.Linear(3, 2)}))
    names = ["", "0", "1", "1.module"]
    assert [name for name, _ in modules(inner)] == names
    compiled = torch.compile(inner)
    assert [name for name, _ in modules(compiled)] == names
    assert [name for name, _ in parameters(compiled)] == [name for name, _ in inner.named_parameters()]
    assert [name for name, _ in parameters([inner[1]])] == ["module.weight", "module.bias"]
