# SPDX-License-Identifier: Apache-2.0
"""Attention over all tiles of a key block as one kernel in Triton.

triton_kernel.py is the backend; triton_call.py launches what triton_forward.py and triton_backward.py compute.
"""
