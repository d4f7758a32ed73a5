# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: console, JSON lines, TensorBoard, FLOPs and MFU, memory and its pictures."""
