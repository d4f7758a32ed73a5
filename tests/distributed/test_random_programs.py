# SPDX-License-Identifier: Apache-2.0
"""Random programs of the public functions on 1, 2 and 4 ranks compute what plain PyTorch computes on one process.

    python -m pytest -n 0 -s tests/distributed/test_random_programs.py --hypothesis-profile=explore --hypothesis-seed=1

A program that differs is printed as Python code, which ``check`` accepts.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.distributed.pool import Pool
from tests.programs import MASKS, WITH_TOKENS_MIXED, Program, Step, bounds, run_on_ranks, run_plain
from tests.properties import examples

pytestmark = pytest.mark.lab

GRIDS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4))
seen: Counter[str] = Counter()
worst: dict[str, float] = {}


def programs() -> st.SearchStrategy[Program]:
    step = st.builds(
        Step,
        kind=st.sampled_from([*WITH_TOKENS_MIXED, *WITH_TOKENS_MIXED, "linear", "place", "norm", "apply"]),
        kv_heads=st.sampled_from([4, 2, 1]),
        mask=st.sampled_from([*MASKS, "each"]),
        checkpoint=st.sampled_from(["", "reentrant", "not reentrant"]),
        tied=st.booleans(),
        alias=st.booleans(),
        chunks=st.integers(1, 3),
        pieces=st.integers(1, 3),
        host=st.sampled_from(["", "offload", "streamed"]),
        recompute=st.booleans(),
        residual=st.booleans(),
        sinks=st.booleans(),
        softcap=st.sampled_from([None, None, 0.5]),
        mixed=st.integers(0, 19).map(lambda n: n == 19),
    )
    return st.builds(
        Program,
        steps=st.lists(step, min_size=1, max_size=3).map(tuple),
        length=st.one_of(*[st.integers(1, 6).map(lambda n: 8 * n)] * 3, st.integers(1, 40)),
        batch=st.integers(1, 2),
        balance=st.sampled_from(["zigzag", "contiguous", "documents"]),
        dtype=st.sampled_from(["float64", "float64", "float64", "float32", "autocast"]),
        mask=st.sampled_from(["", "", *MASKS]),
        loss=st.sampled_from(["square", "sum", "transposed", "cross entropy"]),
        backward=st.sampled_from([*["backward"] * 4, "grad", "grad", "twice"]),
        frozen=st.lists(st.integers(-1, 4), max_size=2).map(tuple),
        seed=st.integers(0, 2**16),
    )


def check(pool: Pool, some: list[Program], ulysses: int, ring: int) -> None:
    """Check outputs and all gradients of programs on one grid."""
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


@examples(10)  # of six programs each
@given(grid=st.sampled_from(GRIDS), some=st.lists(programs(), min_size=6, max_size=6))
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
