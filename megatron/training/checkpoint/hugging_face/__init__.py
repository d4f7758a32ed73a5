# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face: safetensors files, and --load of such folders."""
