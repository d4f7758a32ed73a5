# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own context parallelism: its model, DDP, schedule, reduction and optimizer, as its pretrain_gpt.py.

It is for GPUs: ``run_core_on_cpu`` replaces their names. Its softmax attention over ranks is Transformer Engine's, and
refuses here. Cases that are not about softmax attention have layers of Gated DeltaNet instead, by core's rule in
PyTorch (``deterministic_mode``); fla's norm of queries and keys, a kernel for GPUs, is stood in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

import megatron.context_parallel as cp
from benchmarks.certify.cases import AUX, CASES, HEADS, LENGTH, RATE, VOCABULARY, Batch, Case, NotApplicable, shifted
from megatron.platform.cpu import run_core_on_cpu

FROZEN = {"embed_tokens": "embedding", "layers.0.mlp.gate_proj": "layers.0.mlp.linear_fc1"}  # core's names


def step(case: Case, ranks: int = 1, per_token: bool = False) -> cp.Outcome:
    """The outcome of one training step.

    Args:
        per_token: ``--calculate-per-token-loss``, which divides by the labels of all ranks and micro-batches.
    """
    if case.lora:
        raise NotApplicable("megatron-core has no LoRA")
    run_core_on_cpu()
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state, utils
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    softmax = case in (CASES[name] for name in ("dense", "GQA, 1 KV head", "window", "sinks", "dropout"))
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=HEADS, num_query_groups=case.kv_heads, ffn_hidden_size=96,
        context_parallel_size=ranks, use_cpu_initialization=True, perform_initialization=False, hidden_dropout=0.0,
        attention_dropout=case.dropout, window_size=(case.window - 1, 0) if case.window else None,
        softmax_type="learnable" if case.sinks else "vanilla", pipeline_dtype=torch.float32, normalization="RMSNorm",
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        calculate_per_token_loss=per_token, finalize_model_grads_func=finalize_model_grads,
        bias_activation_fusion=False, deterministic_mode=not softmax, **({} if softmax else LINEAR),
        **(EXPERTS | {"num_moe_experts": case.experts} if case.experts else {}),
    )  # fmt: skip
    model = GPTModel(
        config, layers(config, softmax), VOCABULARY, LENGTH, position_embedding_type="rope" if softmax else "none",
        share_embeddings_and_output_weights=case.tied,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            large = parameter.dim() > 1
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * (0.2 if large else 0.1) + (not large))
        parameter.requires_grad_(not any(FROZEN.get(part, part) in name for part in case.frozen))
    trained = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    settings = OptimizerConfig(optimizer="sgd", lr=RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=case.clip or 0.0)
    optimizer = get_megatron_optimizer(settings, [trained])

    def forward(batches: Iterator[Batch], model: torch.nn.Module) -> tuple:
        batch = next(batches)
        labels = shifted(batch)
        labels[:, -1] = batch["input_ids"][:, 0]  # core's data have a label for each token
        whole = {"tokens": batch["input_ids"], "labels": labels.clamp(min=0), "loss_mask": (labels != -100).float()}
        whole |= {"position_ids": batch["position_ids"], "cu_seqlens": None, "cu_seqlens_padded": None}
        if len(case.documents) > 1:
            whole["cu_seqlens"] = torch.tensor([[0, *case.documents]], dtype=torch.int32)
        part = utils.get_batch_on_this_cp_rank(whole, False, parallel_state.get_context_parallel_group())
        losses = model(part["tokens"], part["position_ids"], None, labels=part["labels"])

        def loss_of(losses: Tensor) -> tuple:
            loss, count = (losses * part["loss_mask"]).sum(), part["loss_mask"].sum().to(torch.int)
            return loss, count, torch.stack([loss.detach(), count])

        return losses, loss_of

    batches = case.batches()
    reported = get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(batches), model=[trained], num_microbatches=len(batches),
        seq_length=LENGTH, micro_batch_size=1,
    )  # fmt: skip
    total = torch.stack(reported).sum(0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    gradients = {
        name: parameter.main_grad.clone() if parameter.requires_grad else None
        for name, parameter in model.named_parameters()
    }
    _, norm, _ = optimizer.step()
    chunks, rank = torch.arange(LENGTH).chunk(2 * ranks), dist.get_rank()
    own = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
    return cp.Outcome(model, total[0] / total[1], gradients=gradients, norm=norm if case.clip else None, positions=own)


LINEAR = dict(
    experimental_attention_variant="gated_delta_net", linear_attention_freq=[1, 1], linear_conv_kernel_dim=4,
    linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
EXPERTS = dict(
    moe_router_topk=2, moe_aux_loss_coeff=AUX, moe_router_load_balancing_type="aux_loss",
    moe_token_dispatcher_type="allgather", moe_ffn_hidden_size=96,
)  # fmt: skip


def layers(config: object, softmax: bool) -> object:
    """Core's description of a layer, with its own modules instead of Transformer Engine's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    if not softmax:
        from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common

        common.HAVE_FLA, common.l2norm = True, unit
        local = LocalSpecProvider()
        layer.submodules.self_attention = ModuleSpec(
            module=GatedDeltaNet,
            submodules=GatedDeltaNetSubmodules(
                in_proj=local.column_parallel_linear(),
                out_norm=local.layer_norm(rms_norm=True, for_qk=False),
                out_proj=local.row_parallel_linear(),
            ),
        )
    return layer


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()
