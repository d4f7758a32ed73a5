# SPDX-License-Identifier: Apache-2.0
"""A small model of transformers, of the kind of a config.json, as a program for ``cp.certify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import megatron.context_parallel as cp

LENGTH, VOCABULARY = 64, 97
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": VOCABULARY,
         "max_position_embeddings": 4 * LENGTH}  # fmt: skip


@dataclass(frozen=True)
class HuggingFace:
    """A training step of a small random model of the kind of a config.json.

    One process runs the model as transformers does; other grids run it with ``parallelize``.
    """

    path: str
    dtype: str = "float32"

    def __call__(self, ulysses: int = 1, ring: int = 1) -> cp.Outcome:
        from transformers import AutoConfig, AutoModelForCausalLM

        from megatron.context_parallel.huggingface import parallelize

        torch.manual_seed(3)
        config = small_config(AutoConfig.from_pretrained(self.path, trust_remote_code=False))
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, self.dtype)).train()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.2)  # large, so that every token depends on those before it
        batch = packed_batch()
        if ulysses * ring == 1:
            loss = model(**batch, use_cache=False).loss
            loss.backward()
            return cp.Outcome(model, loss)
        grid = cp.initialize_grid(ulysses=ulysses, ring=ring)
        with parallelize(model, grid, seq_length=LENGTH) as context:
            loss = model(**context.shard(batch)).loss
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=grid.context.group)
                    parameter.grad /= grid.context.size
            return cp.Outcome(model, loss, positions=context.layout.positions)


def small_config(config: Any) -> Any:
    """The given config, changed in place to a small model of the same kind."""
    heads = getattr(config, "num_attention_heads", 4)
    groups = getattr(config, "num_key_value_heads", None) or heads
    sizes = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4 if groups == heads else 2 if groups > 1 else 1,
             "head_dim": 16}  # fmt: skip
    for name, value in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    if getattr(config, "sliding_window", None):
        config.sliding_window = LENGTH // 4
    if getattr(config, "layer_types", None):
        kinds = list(dict.fromkeys(config.layer_types))
        config.layer_types = (kinds * 2)[:2]
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)
    return config


def packed_batch() -> dict[str, torch.Tensor]:
    """Two documents in one sequence; some labels do not count."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 3:20] = labels[:, 25] = -100
    positions = torch.cat([torch.arange(25), torch.arange(LENGTH - 25)])[None]
    return {"input_ids": ids, "labels": labels, "position_ids": positions}
