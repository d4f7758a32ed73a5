# SPDX-License-Identifier: Apache-2.0
"""The time of a step on a machine, from a trace of its kernels and transfers.

trace.py defines events, seconds.py has the time of an event, *_operations.py describe a layer, estimate.py a step.
"""
