# SPDX-License-Identifier: Apache-2.0
"""Machines as data files: a GPU, the node it sits in, the network between nodes.

machine.py says what a machine is; machine_file.py checks the JSON files in this folder and the user's own;
measure_device.py and measure_links.py make such a file for the machine at hand.
"""
