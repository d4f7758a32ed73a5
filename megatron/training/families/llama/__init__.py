# SPDX-License-Identifier: Apache-2.0
"""Llama: settings and weights, from which most other families take theirs."""
