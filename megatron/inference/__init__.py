# SPDX-License-Identifier: Apache-2.0
"""Generation: a trained model answers prompts on any grid, with its keys and values split over the ranks.

load.py makes a model from flags and a checkpoint, prompts.py reads prompts and writes answers, generate.py has the loop
over batches and tokens, decoder.py one pass over the grid. kv_cache.py keeps keys and values, for cached_attention.py.
"""
