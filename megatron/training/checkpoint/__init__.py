# SPDX-License-Identifier: Apache-2.0
"""Save and load checkpoints; a checkpoint written on one grid can be loaded on any other.

Formats: Megatron-LM's, read and written (megatron_lm/), its older ones (older_formats.py), Hugging Face's, read and
written (hugging_face/, converting/). Copies in host memory are in in_memory/.
"""
