# SPDX-License-Identifier: Apache-2.0
"""megatron-core 0.19.2, context parallelism without --calculate-per-token-loss: ranks with few and many labels are
averaged alike. torchrun --nproc-per-node 2 megatron_core_loss.py (on a CPU: "cuda" is replaced)"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

zeros, torch.cuda.current_device, torch.cuda.current_stream = torch.zeros, lambda: "cpu", lambda: None
torch.zeros = lambda *size, **options: zeros(*size, **options | {"device": "cpu"})
dist.init_process_group("gloo")
parallel_state.initialize_model_parallel(context_parallel_size=2)
weights, targets = torch.randn(2, 64, generator=torch.manual_seed(0))
mask = (torch.arange(64) < 20).float()  # 16 labels on rank 0 and 4 on rank 1
for per_token in True, False:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, context_parallel_size=2, calculate_per_token_loss=per_token,
        finalize_model_grads_func=finalize_model_grads, pipeline_dtype=torch.float32)  # fmt: skip
    table = torch.nn.Embedding(64, 1, _weight=weights[:, None].clone())
    table.model_type, table.set_input_tensor = ModelType.encoder_or_decoder, lambda x: None
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), table)

    def step(data, model):
        part = get_batch_on_this_cp_rank(next(data), False, parallel_state.get_context_parallel_group())
        losses = (model(part["tokens"])[..., 0] - part["labels"]).square() * part["loss_mask"]
        return losses, lambda losses: (losses.sum(), part["loss_mask"].sum().to(torch.int), losses.detach().sum())

    data = {"tokens": torch.arange(64)[None], "labels": targets[None], "loss_mask": mask[None], "cu_seqlens": None}
    get_forward_backward_func()(forward_step_func=step, data_iterator=iter([data]), model=[model], num_microbatches=1,
        seq_length=64, micro_batch_size=1)  # fmt: skip
    right = 2 * (weights - targets) * mask / mask.sum()
    error = (table.weight.main_grad[:, 0] - right).abs().max() / right.abs().max()
    print(f"rank {dist.get_rank()}, per token {per_token}: expected error 0, error of the gradient {error:.0%}")
