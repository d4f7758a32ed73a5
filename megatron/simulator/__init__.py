# SPDX-License-Identifier: Apache-2.0
"""A simulated cluster: what a run needs and how long it takes, before renting the GPUs.

strategy.py   what is trained (Workload) and on which grid, with which memory savings (Strategy)
trace.py      what a step does: kernels, transfers, host copies, memory
dry_run.py    the real program's step on each kind of rank, under fake tensors and a fake process group:
              rehearsal.py runs one rank, record.py writes its trace; gpu_kernels.py, sharded_streams.py: a GPU's ways
formulas/     the same in closed form: memory, communication, FLOPs
hardware.py   machines as data files (machines/, read by machine_file.py); cost.py prices a kernel or a transfer on one
measure.py    such a file for the machine at hand: one device; measure_links.py: between processes
estimate.py   step time in closed form; replay.py of a trace, timeline.py its picture
planner.py    the search for the best strategy in search_space.py; plan_limits.py: the longest sequence, the fewest GPUs
plan_*.py     what is asked; plans in words, as a table and JSON, as a picture, as a command; against a dry run
"""
