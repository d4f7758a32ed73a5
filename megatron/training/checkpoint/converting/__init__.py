# SPDX-License-Identifier: Apache-2.0
"""What the converting programs of tools/ write: checkpoints of ours from other forms, Hugging Face folders of ours."""
