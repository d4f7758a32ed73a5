# SPDX-License-Identifier: Apache-2.0
"""Readers of data and of settings return a value or refuse in one line, also for broken and hostile files."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import data_readers, harness, tokenizer_readers
from tests.fuzz.test_checkpoint_bytes import check

READERS = [*data_readers.READERS, *tokenizer_readers.READERS]


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
