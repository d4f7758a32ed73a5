# SPDX-License-Identifier: Apache-2.0
"""Save and load checkpoints; a checkpoint written on one grid can be loaded on any other.

- checkpoint.py: save and load; checkpoint_folder.py: publishes and removes checkpoints; owner.py: whose folder it is
- sharded_state.py: a rank's tensors; run_state.py: the state without tensors; arguments_of.py: settings
- save_job.py: one save, step by step; rank_file.py: writes a rank's file; checksums.py: the list of files
- read_torch_dist.py: the reader; megatron_lm/: Megatron-LM's checkpoints; older_formats.py: older formats
- hugging_face/: Hugging Face's models and files; converting/: conversions for tools/
- in_memory/: copies in host memory
"""
