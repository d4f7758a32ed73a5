# SPDX-License-Identifier: Apache-2.0
"""A model of PyTorch's caching allocator on a GPU: the memory that it reserves for the allocations of a step."""
