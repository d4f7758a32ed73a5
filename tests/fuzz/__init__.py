# SPDX-License-Identifier: Apache-2.0
"""Readers of files from elsewhere, each given thousands of broken and hostile files; see harness.py."""
