# SPDX-License-Identifier: Apache-2.0
"""Records a trace of what a simulated rank does.

recorder.py intercepts the operations; gpu_kernels.py and fp8.py replace kernels that a CPU cannot run.
triton_launches.py records launches instead, to compile them.
"""
