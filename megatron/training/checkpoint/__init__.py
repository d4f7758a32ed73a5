# SPDX-License-Identifier: Apache-2.0
"""Save and load: any grid writes, any grid reads.

Megatron-LM's form in both directions (megatron_lm/), its older forms (older_formats.py), Hugging Face's in both
directions (hugging_face/, converting/), and copies in host memory (in_memory/).
"""
