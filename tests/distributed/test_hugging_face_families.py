# SPDX-License-Identifier: Apache-2.0
"""Families of transformers' decoders do what docs/use/hugging-face.md says: parity, or a refusal that is true."""

from __future__ import annotations

import pytest
import transformers

from benchmarks.families import END, PAGE, RESULTS, START, good, read, table
from tests.families import FAMILIES
from tests.family_outcomes import outcome

TABLE = PAGE.read_text()
ROWS = {family: (row["outcome"], row.get("why")) for family, row in read(RESULTS).items()}
HERE = pytest.mark.skipif(
    f"transformers {transformers.__version__}," not in TABLE, reason="the page is about another version of transformers"
)
# The first has layers that take a view of attention's output, the second its sizes under text_config; the others are
# refused for one reason each.
USUAL = ("afmoe", "gemma3", "roberta", "marian", "doge", "rwkv", "llama4_text", "blt")


@HERE
@pytest.mark.parametrize("family", [pytest.param(x, marks=() if x in USUAL else pytest.mark.full) for x in ROWS])
def test_the_table_says_what_is(pool, family):
    said, last = ROWS[family]
    ulysses, ring = (2, 2) if said == "parity" else (1, 1)
    found = pool.run(outcome, ulysses * ring, family, ulysses, ring, timeout=120)[0]
    assert found["outcome"] == said and good(found), found
    if said == "refused":
        assert found["why"] == last


@HERE
def test_every_family_is_in_the_table_and_none_is_wrong():
    assert tuple(ROWS) == FAMILIES
    assert {said for said, _ in ROWS.values()} <= {"parity", "refused", "not buildable"}
    assert START + "\n" + table(read(RESULTS), FAMILIES) + END in TABLE


def test_a_new_family_appears_as_not_tried():
    said = table({"llama": {"outcome": "parity", "error": 1e-6}}, ("llama", "llama9"))
    assert "2 families, 1 parity, 1 not tried." in said
    assert "| parity | llama |" in said and "| not tried | llama9 |" in said


def test_a_large_error_is_shown():
    assert "| parity | llama (2.0e-05) |" in table({"llama": {"outcome": "parity", "error": 2e-5}}, ("llama",))


@pytest.mark.parametrize("one", [{"outcome": "refused", "true": False}, {"outcome": "refused"}, {"outcome": "crash"}])
def test_what_is_wrong_stands_out(one):
    assert f"| **{one['outcome']}**: so | llama |" in table({"llama": one | {"why": "so"}}, ("llama",))
