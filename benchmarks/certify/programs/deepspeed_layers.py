# SPDX-License-Identifier: Apache-2.0
"""UlyssesSPAttentionHF computes other logits for windows, packed documents and linear attention, without an error.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_layers.py window      # or full, packed, linear
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3NextConfig

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on a CPU: do not compile what only inference uses
deepspeed.init_distributed("gloo")
size = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
size |= dict(num_key_value_heads=4, head_dim=8, max_position_embeddings=64, pad_token_id=None)
linear = dict(layer_types=["linear_attention", "full_attention"], mlp_only_layers=[0, 1], linear_num_key_heads=2)
linear |= dict(linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
ids, at = torch.arange(64)[None] * 7 % 97, torch.arange(64)[None]
cases = {
    "full": (LlamaConfig(**size), at),
    "window": (MistralConfig(**size, sliding_window=8), at),
    "packed": (LlamaConfig(**size), at % 40),  # two documents
    "linear": (Qwen3NextConfig(**size, **linear), at),
}
config, positions = cases[sys.argv[1]]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.3)
expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
shape = dict(sequence_parallel_size=2, micro_batch_size=1, seq_length=64)
UlyssesSPAttentionHF.register_with_transformers(model, core_attn_implementation="sdpa", **shape)
mine = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
got = model(input_ids=ids[:, mine], position_ids=positions[:, mine], use_cache=False).logits
off = float((got - expected[:, mine]).norm() / expected[:, mine].norm())
print(f"{sys.argv[1]}, rank {dist.get_rank()}: expected a relative error of 1e-6, got {off:.0e}", flush=True)
