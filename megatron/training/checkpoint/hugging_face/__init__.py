# SPDX-License-Identifier: Apache-2.0
"""Models in Hugging Face's format: config.json, names and layouts of tensors, and --load of such folders."""
