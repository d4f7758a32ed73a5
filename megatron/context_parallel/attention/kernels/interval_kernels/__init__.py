# SPDX-License-Identifier: Apache-2.0
"""Kernels of libraries that take a list of tiles as intervals of keys for each query."""
