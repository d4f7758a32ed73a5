# SPDX-License-Identifier: Apache-2.0
"""What a run measures at its steps: time, memory, traces, stragglers."""
