# SPDX-License-Identifier: Apache-2.0
"""Programs as they are: complete scripts, and functions that print their loss and return nothing."""
