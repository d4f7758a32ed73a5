# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own context parallelism. It needs Transformer Engine, so core's GPT on a CPU refuses it."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron.context_parallel as cp
from benchmarks.certify.cases import HEADS, LENGTH, VOCABULARY, Case, whole


def step(case: Case, ranks: int = 1) -> cp.Outcome:
    if ranks == 1:
        return whole(case)
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=HEADS, num_query_groups=case.kv_heads,
        ffn_hidden_size=96, context_parallel_size=ranks, use_cpu_initialization=True, attention_dropout=case.dropout,
        window_size=(case.window - 1, 0) if case.window else None,
        softmax_type="learnable" if case.sinks else "vanilla", pipeline_dtype=torch.float32,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, position_embedding_type="rope")
    raise NotImplementedError(f"{type(model).__name__} was built: compare it")  # a later core may run on a CPU
