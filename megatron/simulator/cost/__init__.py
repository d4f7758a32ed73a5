# SPDX-License-Identifier: Apache-2.0
"""What a step costs on a machine: a trace of kernels and transfers, priced.

trace.py has the events, seconds.py prices one, *_operations.py write a layer down in them, estimate.py adds up a step.
"""
