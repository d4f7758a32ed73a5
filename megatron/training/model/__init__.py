# SPDX-License-Identifier: Apache-2.0
"""Builds the model of this rank, its weights and its optimizer, and splits them over data parallelism."""
