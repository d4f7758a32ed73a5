# SPDX-License-Identifier: Apache-2.0
"""What one rank of a simulated world hands to others: each collective and message that PyTorch is told to carry out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.simulator.dry_run.recording.recorder import sent, transfer


class Traffic(TorchDispatchMode):
    """Counts, while it is active, the numbers (not bytes) that this rank sends to other ranks, by kind of message.

    A collective over n ranks on a message of M numbers in all counts as a ring or pairwise algorithm carries it out:
    all-gather, reduce-scatter and all-to-all send ``M (n - 1) / n`` over every link, M being the whole message for the
    first two and this rank's part of it for the third; all-reduce is a reduce-scatter and an all-gather.

    Attributes:
        sent: numbers, by "all-to-all", "all-gather", "reduce-scatter", "all-reduce" and "send".
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = transfer(func, args, out) if func.namespace == "c10d" else None
        if found is not None and found[0] != "broadcast":
            kind, group, size = found
            itemsize = next(x.element_size() for x in tree_leaves(args) if isinstance(x, torch.Tensor))
            name = "send" if kind == "p2p" else kind.replace("_", "-")
            self.sent[name] += sent(kind, size, group.size()) // itemsize
        return out
