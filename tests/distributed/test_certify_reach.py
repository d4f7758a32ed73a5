# SPDX-License-Identifier: Apache-2.0
"""certify and the parallelism of torch, and routers with ties: right programs pass, planted errors are placed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import megatron.context_parallel as cp
from megatron.certifying.of_torch.whole import modules, parameters
from tests.reach import PLACES, PROGRAMS, Step
from tests.routed import ERRORS, TIES, Routed


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


@pytest.mark.parametrize("seed, by", [(1, "DTensor"), (2, "sort"), (3, "topk"), (4, "topk")])
@pytest.mark.usual(0)
def test_a_router_that_chooses_otherwise_by_rounding_is_reported_and_not_accused(pool, seed: int, by: str) -> None:
    """Without the choices of one process, rounding would explain errors of the size of the gradients."""
    certificate = cp.certify(Routed(seed=seed, by=by), [2], run=pool.run)
    grid = certificate.grids[0]
    assert certificate.right and 0 < len(grid.flips) <= TIES and "layers.0 chose" in str(certificate), str(certificate)
    assert max(one.limit for one in grid.compared) < 1e-3


@pytest.mark.parametrize(
    "error", [name if "output" in name else pytest.param(name, marks=pytest.mark.full) for name in ERRORS]
)
def test_an_error_beside_a_router_with_ties_is_placed(pool, error: str) -> None:
    place = cp.certify(Routed(error, seed=1), [2], run=pool.run).grids[0].place
    assert place is not None and (place.kind, place.modules[0]) == ERRORS[error], place


def test_wrappers_do_not_change_names() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.ModuleDict({"module": nn.Linear(3, 2)}))
    names = ["", "0", "1", "1.module"]
    assert [name for name, _ in modules(inner)] == names
    compiled = torch.compile(inner)
    assert [name for name, _ in modules(compiled)] == names
    assert [name for name, _ in parameters(compiled)] == [name for name, _ in inner.named_parameters()]
    assert [name for name, _ in parameters([inner[1]])] == ["module.weight", "module.bias"]
