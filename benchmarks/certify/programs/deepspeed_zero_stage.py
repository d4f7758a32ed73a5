# SPDX-License-Identifier: Apache-2.0
"""With one loss, ZeRO 0 to 2 multiply gradients by the number of sequence-parallel ranks; ZeRO 3 does not.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_zero_stage.py      # the loss is that of the ALST tutorial
"""

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu
from torch.nn.functional import cross_entropy

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # on a CPU: do not compile what only inference uses
deepspeed.init_distributed("gloo")
mpu.initialize_sequence_parallel(sequence_parallel_size=2)
group, rank = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank()
x = torch.arange(32.0).view(8, 4).sin()  # 8 tokens of one sample
y = torch.tensor([0, 2, 1, 0, 1, 2, 2, 0])

weight = torch.zeros(3, 4, requires_grad=True)
cross_entropy(x @ weight.T, y).backward()
expected = float(weight.grad.norm())

for zero in {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reduce_scatter": False}:
    model = torch.nn.Linear(4, 3, bias=False)
    torch.nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "sequence_parallel_size": 2}
    config["zero_allow_untested_optimizer"] = True
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)  # the change of a weight is its gradient
    engine, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=config, mpu=mpu)
    own = slice(4 * rank, 4 * rank + 4)
    losses = torch.distributed.nn.functional.all_gather(cross_entropy(engine(x[own]), y[own]), group=group)
    engine.backward(sum(losses) / 2)  # both ranks have 4 labels
    engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        got = float(model.weight.norm())
    if dist.get_rank() == 0:
        print(f"{zero}: norm of the gradient: expected {expected:.6f}, got {got:.6f}")
