# SPDX-License-Identifier: Apache-2.0
"""Checks that a parallel program computes what one process computes: losses, gradients, clipping norm and update.

The program is any function; it need not use this library. A difference is traced to the first module that shows it.
The limits follow from rounding: the program runs several times on one process with every result changed by its last bit
(:mod:`rounding`).
"""
