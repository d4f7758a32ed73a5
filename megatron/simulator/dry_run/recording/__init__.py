# SPDX-License-Identifier: Apache-2.0
"""What a simulated rank does, written down as a trace.

recorder.py watches the operations; gpu_kernels.py and fp8.py stand for kernels that a CPU does not have.
"""
