# SPDX-License-Identifier: Apache-2.0
"""From settings to the model on this rank, its weights, its optimizer, and how both are split over data parallelism."""
