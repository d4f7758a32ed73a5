# SPDX-License-Identifier: Apache-2.0
"""PyTorch on gloo: the gradient of torch.distributed.nn.functional.all_gather has its entries in another order, without
an error, where those of the gathered parts are transposed: backward receives rows into tensors of their strides.

torchrun --nproc-per-node 2 pytorch_gloo_all_gather.py
"""

import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.arange(1.0, 7).view(3, 2).T  # transposed, so the gradients below are
expected = (2 * (rank + 1) * weights).flatten().tolist()  # both ranks add both parts

for layout in "as computed", "contiguous":
    x = torch.zeros(2, 3, requires_grad=True)
    parts = all_gather(x)
    if layout == "contiguous":
        for part in parts:
            part.register_hook(torch.Tensor.contiguous)
    sum(((n + 1) * weights * part).sum() for n, part in enumerate(parts)).backward()
    print(f"{rank}, {layout}: expected {expected}, got {x.grad.flatten().tolist()}", flush=True)
