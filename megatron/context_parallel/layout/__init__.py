# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which tokens, and which (query, key) pairs are computed.

The grid says which ranks there are, the sequence layout which positions each of them holds, and masks which keys a
query attends to; tiles follow from these. Nothing here computes attention or depends on megatron-core.
"""
