# SPDX-License-Identifier: Apache-2.0
"""verl 0.9.1: Ulysses splits only flash attention. With sdpa or eager, which the documentation lists as supported, and
in Qwen3-Next's linear attention, each rank sees its own tokens alone, without an error.

torchrun --nproc-per-node 2 verl_ulysses.py sdpa      # or eager, linear
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3NextConfig
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.ulysses import (
    gather_outputs_and_unpad,
    set_ulysses_sequence_parallel_group,
    ulysses_pad_and_slice_inputs,
)

dist.init_process_group("gloo")
size = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
size |= dict(num_key_value_heads=4, head_dim=8, max_position_embeddings=64, pad_token_id=None)
linear = dict(layer_types=["linear_attention"] * 2, mlp_only_layers=[0, 1], linear_num_key_heads=2)
linear |= dict(linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
config = Qwen3NextConfig(**size, **linear) if sys.argv[1] == "linear" else LlamaConfig(**size)
torch.manual_seed(0)
attention = "eager" if sys.argv[1] == "eager" else "sdpa"
model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.3)
ids, at = torch.arange(64)[None] * 7 % 97, torch.arange(64)[None]
expected = model(input_ids=ids, position_ids=at, use_cache=False).logits[0]

set_ulysses_sequence_parallel_group(dist.group.WORLD)  # as FSDPEngine: _build_module, then prepare_model_inputs
apply_monkey_patch(model=model, ulysses_sp_size=2)
own_ids, own_at, pad = ulysses_pad_and_slice_inputs(ids, at, sp_size=2)
logits = model(input_ids=own_ids, position_ids=own_at, use_cache=False).logits[0]
got = gather_outputs_and_unpad(logits, gather_dim=0, unpad_dim=0, padding_size=pad)
print(f"{sys.argv[1]}: expected a relative error of 1e-6, got {(got - expected).norm() / expected.norm():.0e}")
