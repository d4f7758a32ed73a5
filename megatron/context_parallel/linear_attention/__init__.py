# SPDX-License-Identifier: Apache-2.0
"""Linear attention and short convolutions over a layout: a span of tokens is an affine map of a state.

- rules.py: the rules (gated delta, KDA, Mamba2, decay), token by token and prepared in blocks
- block_scan.py: states from block to block; state_kernels.py: the same in Triton
- span_maps.py: a span's map, its outputs after an entry state, and the backward pass of both; fla_kernels.py: the same
  by the kernels of fla-core; decay_spans.py: the same, without a delta rule, by the Triton kernels of decay_kernels.py
- span_exchange.py: which spans lie where; states and their gradients go from span to span
- mixer.py: `linear_attention`, one autograd function
- short_convolution.py: a causal depthwise convolution, whose spans hand on their last rows
"""
