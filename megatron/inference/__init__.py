# SPDX-License-Identifier: Apache-2.0
"""Generation: a trained model answers prompts, on any grid, with its keys and values spread over the ranks.

load.py goes from flags and a checkpoint to a model, prompts.py reads prompts and writes answers, generate.py goes batch
by batch and token by token, decoder.py is one pass over the grid. The cached attention itself is in
context_parallel/attention/kv_cache.py.
"""
