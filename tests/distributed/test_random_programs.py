# SPDX-License-Identifier: Apache-2.0
"""Random programs around the public functions, on 1, 2 and 4 ranks, are what plain PyTorch on one process computes.

    python -m pytest -n 0 -s tests/distributed/test_random_programs.py --hypothesis-profile=explore --hypothesis-seed=1

A program that differs is printed as it is written; ``check`` takes it again.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.pool import Pool
from tests.programs import Program, Step, bounds, programs, run_plain
from tests.programs_on_ranks import run_on_ranks
from tests.properties import examples

GRIDS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
seen: Counter[str] = Counter()
worst: dict[str, float] = {}


def check(pool: Pool, some: list[Program], ulysses: int, ring: int) -> None:
    """Outputs and all gradients of programs on one grid."""
    for program, mine in zip(some, pool.run(run_on_ranks, ulysses * ring, some, ulysses, ring, timeout=60)[0]):
        seen["refused" if isinstance(mine, str) else program.dtype] += 1
        if isinstance(mine, str):
            continue
        exact = run_plain(program)
        limits = bounds(program, exact)
        assert mine.keys() == exact.keys(), program
        for name, right in exact.items():
            error = float((mine[name].double() - right).norm())
            limit = limits[name]
            worst[program.dtype] = max(worst.get(program.dtype, 0.0), error / limit if limit else 0.0)
            assert error <= limit, f"{name} is {error} off, more than {limit}: {ulysses=} {ring=} {program}"


@examples(12)  # of some seven programs each
@given(grid=st.sampled_from(GRIDS), some=st.lists(programs(), min_size=6, max_size=8))
def test_random_programs_are_those_of_plain_pytorch(pool, grid, some):
    check(pool, some, *grid)


def test_what_was_tried():
    print(f"\n{sum(seen.values())} programs: {dict(seen)}; largest errors, of what is allowed: {worst}")
    assert seen["refused"] <= sum(seen.values()) / 2


@pytest.mark.parametrize("dtype", ["float64", "float32", "autocast"])
@pytest.mark.parametrize("kind", ["attention", "chunked", "encoder"])
def test_a_wrong_gradient_is_noticed(pool, kind, dtype):
    program = Program((Step("linear"), Step(kind)), dtype=dtype)
    check(pool, [program], 2, 1)
    with pytest.raises(AssertionError, match=r"off, more than .*wrong=True"):
        check(pool, [Program((Step("linear"), Step(kind)), dtype=dtype, wrong=True)], 2, 1)
