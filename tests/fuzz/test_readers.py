# SPDX-License-Identifier: Apache-2.0
"""All readers return a value or refuse in one line, also for broken and hostile files."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import checkpoint_readers, data_readers, harness, tokenizer_readers

READERS = [*data_readers.READERS, *tokenizer_readers.READERS, *checkpoint_readers.READERS]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_inputs_that_were_kept(reader, tmp_path):
    check(reader, harness.run(reader, harness.corpus(reader), tmp_path))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@pytest.mark.lab
def test_extreme_numbers(reader, tmp_path, pytestconfig):
    """The laboratory tries 100 of them, all with FUZZ or --full."""
    most = None if pytestconfig.getoption("--full") or "FUZZ" in os.environ else 100
    check(reader, harness.run(reader, harness.extremes(reader, most), tmp_path))


@pytest.mark.timeout(0)  # the harness limits each input; 10,000 of them may take half an hour on a busy machine
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
@pytest.mark.lab
def test_new_inputs(reader, tmp_path, pytestconfig):
    count = int(os.environ.get("FUZZ", 10_000 if pytestconfig.getoption("--full") else 100))
    inputs = harness.fresh(reader, int(os.environ.get("FUZZ_SEED", 0)), count)
    check(reader, harness.run(reader, inputs, tmp_path))


def check(reader: harness.Reader, outcome: harness.Outcome) -> None:
    print(f"{reader.name}: {outcome.values} values, {outcome.refusals} refusals, {outcome.seconds:.1f} s")
    for line, count in outcome.lines.most_common(40):
        print(f"  {count:6} {line}")
    message = [f"{one.label}: {one.what} (kept as {harness.keep(reader, one)})" for one in outcome.failures[:20]]
    assert not message, "\n".join(message)
