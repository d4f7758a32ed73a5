# SPDX-License-Identifier: Apache-2.0
"""Conversions for the programs in tools/: other formats to our checkpoints, our checkpoints to Hugging Face folders."""
