# SPDX-License-Identifier: Apache-2.0
"""Who holds which tokens, and what is computed: the one source of truth for positions and for work.

The grid says which ranks there are, the sequence layout which positions each holds, masks which keys a query attends
to; tiles compare the positions of two blocks. Nothing here computes attention or knows megatron-core.
"""
