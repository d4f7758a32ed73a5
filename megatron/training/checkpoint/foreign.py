# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other programs, each in the terms of Megatron-LM's: what ``--load`` takes beside our own."""

from __future__ import annotations

from megatron.training.checkpoint.hugging_face import direct
from megatron.training.checkpoint.megatron_lm import incoming
from megatron.training.checkpoint.megatron_lm.checked import Checked
from megatron.training.checkpoint.megatron_lm.incoming import Theirs
from megatron.training.checkpoint.megatron_lm.places import is_hugging_face
from megatron.training.checkpoint.older import universal
from megatron.training.checkpoint.older.sources import is_universal


def open_foreign(path: Checked) -> Theirs | None:
    """The checkpoint ``path``; None where it is one of ours. Raises Refusal where it cannot be read."""
    if is_hugging_face(path.path):
        return direct.open_folder(path)
    if is_universal(path):
        return universal.open_universal(path)
    return incoming.open_theirs(path)
