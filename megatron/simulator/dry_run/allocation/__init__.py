# SPDX-License-Identifier: Apache-2.0
"""PyTorch's caching allocator on a GPU: what it reserves for the allocations of a step."""
