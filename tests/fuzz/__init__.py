# SPDX-License-Identifier: Apache-2.0
"""Fuzz tests of all readers of untrusted files; see harness.py."""
