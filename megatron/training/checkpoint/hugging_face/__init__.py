# SPDX-License-Identifier: Apache-2.0
"""Models in Hugging Face's form: what their config.json says, their tensors beside ours, and --load of them."""
