# SPDX-License-Identifier: Apache-2.0
"""What a family is, and a Llama: settings, weights, windows; most families build on it."""
