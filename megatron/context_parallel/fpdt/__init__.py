# SPDX-License-Identifier: Apache-2.0
"""FPDT: attention, FFN and loss in pipelined chunks, with host memory behind them (FPDT paper, section 4).

chunked_layer.py is a layer chunk by chunk; its loops are by_queries.py and by_keys.py, one chunk is chunk_work.py.
chunked_ffn.py and chunked_loss.py take token-wise layers and the loss in spans of tokens. host_store.py is the host
memory behind them.
"""
