# SPDX-License-Identifier: Apache-2.0
"""Finds the fastest way to train a model on given GPUs, among all that fit.

search.py prices the strategies of search_space.py; limits.py finds the longest sequence and the fewest GPUs; confirm.py
compares a plan with a dry run. The other modules report: text, tables, JSON, a page, a command.
"""
