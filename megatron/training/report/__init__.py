# SPDX-License-Identifier: Apache-2.0
"""What a run tells of itself: console, JSON lines, TensorBoard, FLOPs and MFU, memory and its pictures."""
