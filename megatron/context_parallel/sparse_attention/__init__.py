# SPDX-License-Identifier: Apache-2.0
"""Learned sparsity: each query chooses the keys that it reads (DeepSeek V3.2's sparse attention, GLM-5).

On a grid the queries stay and the keys come: all heads share the chosen keys, and mostly the keys themselves, which are
short. Every rank gathers the index keys and the keys of the sequence for the duration of one call; that is linear in
the length. Untrained indexers choose nearly all keys together. Trained ones may choose few, but to fetch only these
the host would have to wait for their numbers, to save what takes little time beside the indexer's scores
(benchmarks/sparse_counts.py). Ulysses ranks take their part of the queries, as ring ranks do.
"""
