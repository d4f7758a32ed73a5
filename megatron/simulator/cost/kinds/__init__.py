# SPDX-License-Identifier: Apache-2.0
"""Work of the kinds of layers, by the names that their closed forms give (formulas/kinds/).

A mixer's module has both passes of its parts: ``project``, ``mix`` and ``output``, and the same with ``_grad``.
"""
