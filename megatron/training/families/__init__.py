# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face: one table, one file for each architecture: settings and names of weights."""
