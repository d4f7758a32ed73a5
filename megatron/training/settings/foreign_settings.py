# SPDX-License-Identifier: Apache-2.0
"""Other programs' names for settings of this one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.settings.flag import flag


@dataclass
class ForeignConfig:
    """Other programs' names for settings; `foreign_flags.py` copies their values into those settings."""

    checkpoint_activations: bool = flag(
        False, "Megatron-DeepSpeed, Megatron-LM before 3: --recompute-granularity full --recompute-method uniform"
    )
    checkpoint_num_layers: int | None = flag(
        None, "layers per unit of --checkpoint-activations: --recompute-num-layers; default 1"
    )
    deepspeed_activation_checkpointing: bool = flag(
        False, "DeepSpeed: recomputes nothing without --checkpoint-activations"
    )
    checkpoint_in_cpu: bool = flag(False, "--offload-checkpoints, if layers are recomputed")
    activations_checkpoint_granularity: str | None = flag(
        None, "NeMo: --recompute-granularity", choices=["selective", "full"]
    )
    activations_checkpoint_method: str | None = flag(
        None, "--recompute-granularity full --recompute-method", choices=["uniform", "block"]
    )
    activations_checkpoint_num_layers: int | None = flag(
        None, "--recompute-num-layers of --activations-checkpoint-method; default 1"
    )
    recompute_modules: list[str] | None = flag(
        None, "what --recompute-granularity selective recomputes: core_attn", nargs="+"
    )
    use_megatron_fsdp: bool = flag(
        False, "--zero-stage, by --data-parallel-sharding-strategy", aliases=["--use-custom-fsdp"]
    )
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        "of --use-megatron-fsdp: --zero-stage 0, 1, 2 or 3",
        choices=["no_shard", "optim", "optim_grads", "optim_grads_params"],
    )
    megatron_fsdp_main_grads_dtype: str = flag(
        "auto", "of --use-megatron-fsdp: bf16 is --grad-reduce-in-bf16", choices=["auto", "fp32", "bf16"]
    )
    megatron_fsdp_grad_comm_dtype: str = flag(
        "auto", "the same: dtype in which gradients are sent", choices=["auto", "fp32", "bf16"]
    )
    dataloader_inter_document_masking: bool = flag(False, "--reset-attention-mask --reset-position-ids")
    hybrid_layer_pattern: str | None = flag(
        None, "--is-hybrid-model --hybrid-override-pattern, with as many --num-layers; | ends a pipeline stage"
    )
    use_torch_fsdp2: bool = flag(False, "--zero-stage 3")
    torch_fsdp2_reshard_after_forward: bool = flag(
        True, "with --use-torch-fsdp2: --zero-stage 2", flags=["--torch-fsdp2-no-reshard-after-forward"]
    )
    deepspeed: bool = flag(False, "read --deepspeed_config, as far as it has equivalents here")
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed's JSON file: ZeRO, precision, clipping, batch sizes",
        flags=["--deepspeed_config", "--deepspeed-config"],
    )
    deepspeed_mpi: bool = flag(
        False, "DeepSpeed: processes started by MPI", flags=["--deepspeed_mpi"], aliases=["--use-mpi"]
    )
    rank: int | None = flag(None, "number of this process, for launchers that set no RANK")
    local_rank: int = flag(0, "number of this process on its node", aliases=["--local_rank"])
    dist_url: str | None = flag(
        None, "tcp://HOST:PORT of process 0, instead of MASTER_ADDR and MASTER_PORT", aliases=["--dist_url"]
    )
    no_cuda: bool = flag(False, "--device cpu")
    eval_only: list[str] | None = flag(None, "BigScience: --skip-train", nargs="*", aliases=["--no-train"])
    use_precision_aware_optimizer: bool = flag(
        False, "an optimizer in other dtypes; of these, only --main-grads-dtype bf16 is supported"
    )
    main_grads_dtype: str = flag(
        "fp32", "of --use-precision-aware-optimizer: bf16 is --grad-reduce-in-bf16", choices=["fp32", "bf16"]
    )
    o2_gradient: bool = flag(False, "MindSpeed: --grad-reduce-in-bf16")
    pp_partition_method: str | None = flag(
        None,
        "DeepSpeed: type:transformer|embedding is --account-for-embedding-in-pipeline-split and -loss-, if that "
        "makes stages equally long",
    )
    no_pipeline_parallel: bool = flag(False, "DeepSpeed: --pipeline-model-parallel-size 1")
    num_key_value_heads: int | None = flag(None, "Megatron-DeepSpeed: --group-query-attention --num-query-groups")
    attention_head_type: str | None = flag(
        None, "BigCode: multiquery is --group-query-attention", choices=["multihead", "multiquery"]
    )
    glu_activation: str | None = flag(
        None, "BigScience: --swiglu, with an MLP of 4h unless --ffn-hidden-size is given", choices=["swiglu"]
    )
    spec: list[str] | None = flag(
        None, "module that defines the layers; only modules with megatron-core's own layers are supported", nargs="*"
    )
    context_parallel_algo: str | None = flag(
        None,
        "MindSpeed: --cp-comm-type a2a, p2p, a2a+p2p with --ulysses-degree-in-cp, or all_gather",
        choices=["ulysses_cp_algo", "megatron_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo", "adaptive_cp_algo",
                 "hybrid_adaptive_cp_algo"],
    )  # fmt: skip
    optimizer_selection: str | None = flag(
        None, "MindSpeed: implementation of AdamW; --optimizer adam", choices=["fused_adamw", "fused_torch_adamw"]
    )
    overlapped_distributed_optimizer: bool = flag(
        False, "Megatron-LLaMA: --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    )
    enable_hf2mg_convert: bool = flag(False, "MindSpeed: --load names a Hugging Face folder, which is read as it is")
    rope_scaling_type: str | None = flag(None, "MindSpeed: llama3 is --use-rope-scaling", choices=["llama3"])
    low_freq_factor: float | None = flag(None, "of --rope-scaling-type llama3: 1")
    high_freq_factor: float | None = flag(None, "of --rope-scaling-type llama3: 4")
    original_max_position_embeddings: int | None = flag(None, "of --rope-scaling-type llama3: 8192")
