# SPDX-License-Identifier: Apache-2.0
"""What becomes of a family over ranks: the numbers of one process, or a refusal whose reason is true."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import parallelize
from tests.errors import worst
from tests.families import small_model
from tests.family_reasons import is_true
from tests.hugging_face import LENGTH, Outcome, averaged, errors, take_grads, whole_batch

LIMIT = 1e-5  # of the largest entry, in fp32
BITS = 4  # rounding meets every operation, and not the weights alone


def outcome(family: str, ulysses: int = 2, ring: int = 2) -> dict[str, Any]:
    """On the first rank: ``outcome`` and, by it, ``error`` or ``why``, and whether a refusal's reason is ``true``."""
    first = dist.get_rank() == 0
    batch = whole_batch()
    batch["input_ids"] = batch["input_ids"] % 80 + 3  # images, sounds and what pads have others
    batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["input_ids"])
    try:
        model = small_model(family)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is why
        return {"outcome": "not buildable", "why": told(error)}
    try:
        context = parallelize(model, cp.initialize_grid(ulysses=ulysses, ring=ring), seq_length=LENGTH)
        inputs = context.shard({name: x for name, x in batch.items() if name != "labels"})
        with torch.no_grad():
            logits = context.gather(model(**inputs).logits, inputs)
        loss = model(**context.shard(batch)).loss
        loss.backward()
        grads = averaged(take_grads(model), context.grid.context.group)
        context.remove()
    except ValueError as error:
        true = is_true(str(error), small_model(family)) if first else None
        return {"outcome": "refused", "why": told(error), "true": true}
    except Exception as error:  # noqa: BLE001 - it is what is looked for
        return {"outcome": "crash", "why": told(error)}
    if not first:
        return {}
    try:
        expected = by_document(model, batch)
    except Exception as error:  # noqa: BLE001
        return {"outcome": "not buildable", "why": told(error)}
    if missing := set(expected.grads) ^ set(grads):
        return {"outcome": "wrong", "why": f"gradients of {sorted(missing)[0]} and {len(missing) - 1} more"}
    found = errors(Outcome(logits, loss.detach(), grads), expected)
    name = max(found, key=found.get)
    worst_one = worst(found.values())
    if not worst_one < LIMIT and not worst_one < BITS * worst(last_bit(family, batch, expected)):
        return {"outcome": "wrong", "why": f"{name} by {found[name]:.1e}", "loss": found["loss"]}
    return {"outcome": "parity", "error": found[name]}


def by_document(model: PreTrainedModel, batch: dict[str, Tensor]) -> Outcome:
    """What transformers alone makes of each document by itself, so that none can see another."""
    tokens, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    rows = []
    for row in range(tokens.size(0)):
        starts = [*torch.nonzero(positions[row] == 0).flatten().tolist(), tokens.size(1)]
        parts = [model(input_ids=tokens[row : row + 1, a:b]).logits for a, b in zip(starts, starts[1:])]
        rows.append(torch.cat(parts, dim=1))
    logits = torch.cat(rows)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    total.backward()
    return Outcome(logits.detach(), total.detach(), take_grads(model))


def last_bit(family: str, batch: dict[str, Tensor], expected: Outcome) -> Iterable[float]:
    """How far numbers on one process move where each weight changes by about its last bit."""
    model = small_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + torch.randn_like(parameter) * torch.finfo(parameter.dtype).eps
    return errors(by_document(model, batch), expected).values()


def told(error: BaseException) -> str:
    """In one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"[:300]
