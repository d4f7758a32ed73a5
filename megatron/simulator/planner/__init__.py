# SPDX-License-Identifier: Apache-2.0
"""The fastest way to train a model on some GPUs, among all that fit.

search.py tries what search_space.py offers; limits.py finds the longest sequence and the fewest GPUs; the rest says it:
in words, as a table, JSON, a picture, a command; and against a dry run (confirm.py).
"""
