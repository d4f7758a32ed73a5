# SPDX-License-Identifier: Apache-2.0
"""ms-swift 4.6.0: ring attention has right outputs and wrong gradients: grad_block_lse is dropped, lse set in place."""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from swift.sequence_parallel.zigzag_ring_attn import zigzag_ring_flash_attn_varlen_func


def scores(q, k, scale, causal):
    s = torch.einsum("shd,thd->hst", q.float(), k.float()) * scale
    return s.masked_fill(torch.ones_like(s[0]).bool().triu(1), -torch.inf) if causal else s


def forward(q, k, v, softmax_scale, causal, **_):
    s, vs = scores(q, k, softmax_scale, causal), v.float()
    return torch.einsum("hst,thd->shd", s.softmax(-1), vs).to(q.dtype), s.logsumexp(-1), None, None


def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, **_):
    p, g = (scores(q, k, softmax_scale, causal) - softmax_lse[..., None]).exp(), dout.float()
    ds = p * (torch.einsum("shd,thd->hst", g, v.float()) - (g * out.float()).sum(-1).T[..., None]) * softmax_scale
    for grad, how, a, b in (dq, "hst,thd->shd", ds, k), (dk, "hst,shd->thd", ds, q), (dv, "hst,shd->thd", p, g):
        grad.copy_(torch.einsum(how, a, b.float()))


fake = SimpleNamespace(_flash_attn_varlen_forward=forward, _flash_attn_varlen_backward=backward)
sys.modules |= {"flash_attn": fake, "flash_attn.flash_attn_interface": fake}
dist.init_process_group("gloo")  # torchrun --nproc-per-node 2 swift_ring.py
rank, (*qkv, g) = dist.get_rank(), torch.randn(4, 64, 2, 16, generator=torch.manual_seed(0)).bfloat16()
whole = [x.clone().requires_grad_() for x in qkv]
torch.einsum("hst,thd->shd", scores(*whole[:2], 0.25, True).softmax(-1), whole[2].float()).backward(g.float())
own = torch.cat([torch.arange(64).chunk(4)[i] for i in (rank, 3 - rank)])
part = [x[own][None].requires_grad_() for x in qkv]
zigzag_ring_flash_attn_varlen_func(*part, torch.tensor([0, 64]), 64, causal=True).backward(g[own][None])
for name, x, y in zip("qkv", whole, part):
    want, got = x.grad[own].float(), y.grad[0].float()
    print(f"{rank} d{name}: expected {want.norm():.3f}, got {got.norm():.3f}, {(want - got).norm() / want.norm():.1%}")
