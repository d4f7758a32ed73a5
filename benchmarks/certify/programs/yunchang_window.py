# SPDX-License-Identifier: Apache-2.0
"""yunchang 0.6.4: LongContextAttention takes window_size, but its rings pass it to each block of keys, where it counts
from the block's end. flash-attn is stood in on a CPU. torchrun --nproc-per-node 2 yunchang_window.py"""

import sys
from unittest.mock import MagicMock

import torch
import torch.distributed as dist


def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, **_):  # as flash-attn 2.8
    back = torch.arange(q.size(1))[:, None] + k.size(1) - q.size(1) - torch.arange(k.size(1))
    right = 0 if causal else window_size_right
    hidden = ((back > window_size_left) & (window_size_left >= 0)) | ((back < -right) & (right >= 0))
    s = (torch.einsum("bshd,bthd->bhst", q, k) * softmax_scale).masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    p = (s - lse[..., None]).exp().nan_to_num()  # a query without keys has out 0 and lse inf
    return torch.einsum("bhst,bthd->bshd", p, v), lse.masked_fill(lse == -torch.inf, torch.inf), None, None


fake = MagicMock(__version__="2.8.3", _flash_attn_forward=forward)
sys.modules["flash_attn"] = sys.modules["flash_attn.flash_attn_interface"] = fake
from yunchang import EXTRACT_FUNC_DICT, LongContextAttention, set_seq_parallel_pg  # noqa: E402

dist.init_process_group("gloo")
rank, (q, k, v) = dist.get_rank(), torch.randn(3, 1, 64, 2, 16, generator=torch.manual_seed(0))
set_seq_parallel_pg(1, 2, rank, 2)
for kind in "basic", "zigzag":
    for window in (-1, -1), (15, 0):
        expected, part = forward(q, k, v, 0.0, 0.25, True, *window)[0], EXTRACT_FUNC_DICT[kind]
        expected, *mine = (part(x, rank, world_size=2, rd=2, ud=1) for x in (expected, q, k, v))
        got = LongContextAttention(ring_impl_type=kind)(*mine, softmax_scale=0.25, causal=True, window_size=window)
        print(f"{kind}, window {window}, rank {rank}: expected {expected.norm():.3f}, got {got.norm():.3f},",
              f"error {(expected - got).norm() / expected.norm():.1%}")  # fmt: skip
