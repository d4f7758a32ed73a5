# SPDX-License-Identifier: Apache-2.0
"""What one rank of a simulated world hands to others: each collective and message that PyTorch is told to carry out."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


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
        if func.namespace == "c10d":
            self._count(func._schema.name.split("::")[1], args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple, kwargs: dict) -> None:
        if name in ("recv_", "recv_any_source_", "barrier", "broadcast_"):
            return
        if name == "send":
            self.sent["send"] += sum(x.numel() for x in args[0])
            return
        group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
        ranks, others = group.size(), group.size() - 1
        if name == "alltoall_base_":
            whole, splits = args[1], args[4]
            own = splits[group.rank()] * (whole.numel() // whole.size(0)) if splits else whole.numel() // ranks
            self.sent["all-to-all"] += whole.numel() - own
        elif name == "_allgather_base_":
            self.sent["all-gather"] += args[1].numel() * others
        elif name == "_reduce_scatter_base_":
            self.sent["reduce-scatter"] += args[0].numel() * others
        elif name == "allreduce_":
            self.sent["all-reduce"] += 2 * sum(x.numel() for x in args[0]) * others // ranks
        elif ranks > 1:
            raise NotImplementedError(f"torch.distributed's {name} is not counted yet")
