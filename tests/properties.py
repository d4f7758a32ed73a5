# SPDX-License-Identifier: Apache-2.0
"""Hypothesis' profiles: the same few examples in every run, or many new ones with --hypothesis-profile=explore.

The profile ``few`` is for tests/mutants, which runs each test many times and does not look for the smallest example.
"""

from __future__ import annotations

from hypothesis import Phase, settings

USUAL, FAR = 100, 2500  # examples per test in the profiles ci and explore, unless the test gives a number

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=USUAL, database=None)
settings.register_profile(
    "few", derandomize=True, deadline=None, max_examples=USUAL // 10, database=None,
    phases=[Phase.explicit, Phase.generate],
)  # fmt: skip
settings.register_profile("explore", derandomize=False, deadline=None, max_examples=FAR, print_blob=True)


def examples(count: int) -> settings:
    """Settings of a test that needs only ``count`` examples; exploring multiplies the number as for other tests."""
    return settings(max_examples=max(1, count * settings.default.max_examples // USUAL))
