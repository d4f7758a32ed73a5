# SPDX-License-Identifier: Apache-2.0
"""Samples of tokens: of .bin/.idx files, packed or not, with fill in the middle, and of no files (--mock-data)."""
