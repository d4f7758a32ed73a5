# SPDX-License-Identifier: Apache-2.0
"""What layers are told of a batch's samples, in the one tensor that megatron-core hands through to each of them.

It is int64 [b, n] in host memory: where documents end, after a first column of negative numbers that says which samples
of the run these are. Either may be missing. A tensor, because recompute keeps nothing else of a layer's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel.layout.documents import document_rows


@dataclass(frozen=True)
class Samples:
    """The samples of a batch.

    Attributes:
        numbers: of each, among all samples of the run; () where nobody said.
        ends: of each, where its documents end; () where each is one document.
    """

    numbers: tuple[int, ...] = ()
    ends: tuple[tuple[int, ...], ...] = ()


def told(numbers: Tensor | None, ends: Tensor | None) -> Tensor | None:
    """The tensor that says both: of ``numbers`` [b] and ``ends`` [b, n], int64; None where there is nothing to say."""
    if numbers is None:
        return ends
    first = (-1 - numbers)[:, None]
    return first if ends is None else torch.cat((first, ends), dim=1)


def samples(said: Tensor | None) -> Samples:
    """What such a tensor says.

    Raises:
        ValueError: it is something else, a dense mask say.
    """
    if said is None:
        return Samples()
    rows = document_rows(said)
    if not all(row and row[0] < 0 for row in rows):
        return Samples(ends=tuple(rows))
    ends = tuple(row[1:] for row in rows)
    return Samples(tuple(-1 - row[0] for row in rows), ends if all(ends) else ())
