# SPDX-License-Identifier: Apache-2.0
"""Attention over all tiles of a key block as one Triton kernel.

triton_kernel.py is the backend; triton_call.py launches the kernels of triton_forward.py and triton_backward.py.
"""
