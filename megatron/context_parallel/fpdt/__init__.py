# SPDX-License-Identifier: Apache-2.0
"""FPDT: attention, FFN and loss in pipelined chunks, with host memory behind them (FPDT paper, section 4).

A layer chunk by chunk (chunked_layer.py; its loops by_queries.py and by_keys.py; one chunk, chunk_work.py), token-wise
layers and the loss in spans of tokens (chunked_ffn.py, chunked_loss.py), and host memory: its blocks (host_pool.py),
copies (offload.py), what waits there (shelf.py).
"""
