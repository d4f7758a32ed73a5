# SPDX-License-Identifier: Apache-2.0
"""FPDT for layers whose queries choose their keys."""
