# SPDX-License-Identifier: Apache-2.0
"""AutoSP splits labels before transformers shifts them, so the label of each rank's last token is lost (as at 32 here),
and averages the ranks' means, however few labels a rank has. Nothing is reported. The program follows DeepSpeed's
training page and DeepSpeedExamples/benchmarks/autosp/run.py.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_autosp.py 0      # or 40: only tokens from there have labels
"""

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.compile.passes.sp_compile import prepare_autosp_inputs
from transformers import AutoModelForCausalLM, LlamaConfig

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on a CPU: do not compile what only inference uses
deepspeed.init_distributed("gloo")
size = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
size |= dict(num_key_value_heads=4, head_dim=8, max_position_embeddings=64, pad_token_id=None, use_cache=False)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**size), attn_implementation="sdpa").train()
at, mask, weight, want = torch.arange(64)[None], torch.ones(1, 64, dtype=torch.long), model.lm_head.weight, {}
ids = at * 7 % 97
labels = ids.where(at >= int(sys.argv[1]), -100)
for name, chosen in ("all labels", labels), ("all but token 32", labels.where(at != 32, -100)):
    model(input_ids=ids, labels=chosen, position_ids=at, attention_mask=mask).loss.backward()
    want[name], weight.grad = weight.grad, None
model.zero_grad()
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "sequence_parallel_size": 2}
config |= {"compile": {"deepcompile": True, "passes": ["autosp"]}, "gradient_clipping": 0.0}
before, sgd = weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=1.0)
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config)
engine.compile(backend="inductor")
ids, labels, at, mask = prepare_autosp_inputs(ids, labels, at, mask, seq_dim=1)
engine.backward(engine(input_ids=ids, labels=labels, position_ids=at, attention_mask=mask).loss)
engine.step()
off = ", ".join(f"{(before - weight - x).norm() / x.norm():.1e} to {name}" for name, x in want.items())
print(f"{dist.get_rank()}: relative errors of the gradient: {off}", flush=True)
