# SPDX-License-Identifier: Apache-2.0
"""Fault injection into jobs (docs/use/reliability.md). The usual run has a few cases of each kind, run.sh many."""
