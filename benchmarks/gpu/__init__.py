# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can tell, measured in stages: kernels against the GEMM rate, steps, FPDT, the simulator beside them.

__main__.py runs the stages, each in a process of its own; stage.py keeps time and figures; sizes.py says how large.
"""
