# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: memory and time of a training run, without GPUs.

machines/   GPUs, nodes and networks as data files, and measurement of a machine
cost/       the time of a kernel and of a transfer, and a closed form for the time of a step (estimate.py)
dry_run/    a step of the real program on each kind of rank, with fake tensors and a fake process group
planner/    the search for the fastest way to train a model on given GPUs, with reports
"""
