# SPDX-License-Identifier: Apache-2.0
"""Measurements that need a GPU, in stages: kernels against the GEMM rate, steps, FPDT, the simulator's predictions.

__main__.py runs the stages in separate processes; stage.py keeps time and figures, and has the problem sizes.
"""
