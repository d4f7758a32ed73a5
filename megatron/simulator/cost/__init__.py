# SPDX-License-Identifier: Apache-2.0
"""The time of a step on a machine, from a trace of its kernels and transfers.

trace.py defines events, seconds.py prices one, *_operations.py describe a layer by events, estimate.py adds up a step.
"""
