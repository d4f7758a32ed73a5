# SPDX-License-Identifier: Apache-2.0
# With sp_size=2, Trainer makes another update than on one process, without an error (dense is right):
# DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 trainer_sp.py accumulation      # or dense, window, experts

import sys

import deepspeed
import torch
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, MixtralConfig, Trainer, TrainingArguments

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on a CPU: do not compile what only inference uses
deepspeed.init_distributed("gloo")
case = sys.argv[1]
size = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
size |= dict(num_key_value_heads=4, pad_token_id=None, tie_word_embeddings=False)
experts = dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5)
make = {"window": lambda: MistralConfig(**size, sliding_window=8), "experts": lambda: MixtralConfig(**size, **experts)}
config = make.get(case, lambda: LlamaConfig(**size))()
at, few = torch.arange(64), torch.arange(64) > 55
data = [{"input_ids": at * 7 % 97, "labels": at * 7 % 97, "position_ids": at}]
data += [data[0] | {"labels": data[0]["labels"].where(few, -100)}] * (case == "accumulation")  # with 8 labels
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
count = sum(int((row["labels"][1:] != -100).sum()) for row in data)  # Trainer divides by all labels of a step
for row in data:
    model(**{k: x[None] for k, x in row.items()}, num_items_in_batch=count).loss.backward()
weight = model.model.layers[0].self_attn.q_proj.weight
expected, before = weight.grad.clone(), weight.detach().clone()
zero = dict(zero_optimization={"stage": 3}, zero_allow_untested_optimizer=True, gradient_accumulation_steps=len(data))
zero |= dict(train_micro_batch_size_per_gpu=1, zero_force_ds_cpu_optimizer=False, gradient_clipping=0.0)
sp = ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=DeepSpeedSequenceParallelConfig(64, True, "sdpa"))
plan = dict(use_cpu=True, max_steps=1, learning_rate=1.0, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0)
plan |= dict(per_device_train_batch_size=1, gradient_accumulation_steps=len(data), report_to=[], save_strategy="no")
Trainer(model, TrainingArguments("out", deepspeed=zero, parallelism_config=sp, **plan), train_dataset=data).train()
with deepspeed.zero.GatheredParameters([weight]):
    got = before - weight.detach()
off = (got - expected).norm() / expected.norm()
print(f"{case}: gradient norm: expected {expected.norm():.6f}, got {got.norm():.6f}; off by {off:.0e}", flush=True)
