# SPDX-License-Identifier: Apache-2.0
"""FPDT: attention, FFN and loss in pipelined chunks, offloaded to host memory (FPDT paper, section 4).

chunked_layer.py computes a layer chunk by chunk; its loops are in by_queries.py and by_keys.py, the work on one chunk
in chunk_work.py. chunked_ffn.py, chunked_loss.py and log_probs.py compute token-wise layers, the loss and
log-probabilities in spans of tokens.
host_store.py manages host memory.
"""
