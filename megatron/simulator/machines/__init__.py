# SPDX-License-Identifier: Apache-2.0
"""Machines as data files: a GPU, the node it sits in, the network between nodes.

machine.py defines a machine; machine_file.py reads and checks the JSON files in this folder and the user's;
measure_device.py and measure_links.py measure the machine that they run on, to make a file for it.
"""
