# SPDX-License-Identifier: Apache-2.0
"""yunchang 0.6.4: with AttnType.TORCH_MATH the log-sum-exp of each block is 0, so a ring weighs all blocks alike.
Forward only, as the README says. torchrun --nproc-per-node 2 yunchang_torch_math.py"""

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg
from yunchang.kernels import AttnType

dist.init_process_group("gloo")
rank, (q, k, v) = dist.get_rank(), torch.randn(3, 1, 64, 2, 16, generator=torch.manual_seed(0))
set_seq_parallel_pg(1, 2, rank, 2)
expected = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
expected, *mine = (EXTRACT_FUNC_DICT["basic"](x, rank, world_size=2) for x in (expected, q, k, v))
got = LongContextAttention(ring_impl_type="basic", attn_type=AttnType.TORCH_MATH)(*mine, causal=True)
error = (expected - got).norm() / expected.norm()
print(f"rank {rank}: expected norm {expected.norm():.3f}, got {got.norm():.3f}, error {error:.1%}")
