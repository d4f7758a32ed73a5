# SPDX-License-Identifier: Apache-2.0
"""FPDT: attention, FFN and loss in pipelined chunks, with host memory behind them (FPDT paper, section 4).

Host memory and its copies (offload.py), token-wise layers and the loss in runs of tokens (chunked_ffn.py,
chunked_loss.py), and a whole layer chunk by chunk (chunked_layer.py, chunk_pass.py).
"""
