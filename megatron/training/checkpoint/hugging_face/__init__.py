# SPDX-License-Identifier: Apache-2.0
"""Llama checkpoints from Hugging Face's form to ours and back, bit for bit; `tools/convert_hf.py` is the program."""
