# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: what a run needs and how long it takes, before renting the GPUs.

machines/   GPUs, nodes and networks as data files, and measuring the one at hand
cost/       what a kernel or a transfer costs on one; the time of a step in closed form (estimate.py)
dry_run/    the real program's step on each kind of rank, under fake tensors and a fake process group, and its replay
planner/    the search for the fastest way to train a model on some GPUs, in words, tables and pictures
"""
