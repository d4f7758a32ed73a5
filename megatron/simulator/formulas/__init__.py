# SPDX-License-Identifier: Apache-2.0
"""What a step needs, in closed form: memory, communication, FLOPs; and the papers' own formulas beside ours."""
