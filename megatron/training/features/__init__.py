# SPDX-License-Identifier: Apache-2.0
"""What a run does in addition to its steps. The loop calls most of these by the interface in feature.py."""
