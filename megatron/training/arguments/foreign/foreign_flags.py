# SPDX-License-Identifier: Apache-2.0
"""Copies other programs' flags into settings of this one.

Older Megatron-LM, Megatron-DeepSpeed, NeMo and Megatron-FSDP have flags that mean one or several of our settings. Each
flag is converted exactly, or refused if it contradicts another one. A note says if the other program ignores it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from megatron.training.arguments.foreign.deepspeed_file import DeepSpeedFile
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal
from megatron.training.settings.config import Config, ForeignConfig


def translate(config: Config, given: Collection[str]) -> None:
    """Copy ``config.foreign`` into the other settings and empty it; remarks go to ``config.notes``.

    Args:
        given: settings that the command line sets, as "section.field"; other programs' flags must agree with them.

    Raises:
        Refusal: two flags give one setting different values.
    """
    assign = _Assign(config, given)
    _deepspeed(config, assign)
    _program(config, assign)
    _precision(config, assign)
    _recompute(config, assign)
    _zero(config, assign)
    _heads(config, assign)
    _layers(config, assign)
    _grid(config, assign)
    _rope(config, assign)
    _checkpoints(config)
    config.foreign = ForeignConfig()


class _Assign:
    """Sets a setting "section.field", and refuses a value that differs from the one on the command line.

    ``source`` names the flag or the file that asks for the value, for the message.
    """

    def __init__(self, config: Config, given: Collection[str]) -> None:
        self.config, self.given = config, given

    def __call__(self, name: str, value: Any, source: str) -> None:
        section, field = name.split(".")
        part = getattr(self.config, section)
        if name in self.given and (current := getattr(part, field)) != value:
            raise Refusal(
                source,
                f"is {_words(field, value)}, and {_words(field, current)} is given: leave one out",
                about=_flag(field),
            )
        setattr(part, field, value)

    def is_given(self, name: str) -> bool:
        return name in self.given


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _words(field: str, value: Any) -> str:
    flag = _flag(field)
    if value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


def _deepspeed(config: Config, assign: _Assign) -> None:
    other = config.foreign
    if other.deepspeed_config and not other.deepspeed:
        raise Refusal("--deepspeed_config", "is read only with --deepspeed: add that, or leave it out", LEAVE_OUT)
    started_by_mpi = max(int(os.environ.get(name, "1")) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if other.deepspeed_mpi and started_by_mpi > 1 and "WORLD_SIZE" not in os.environ:
        raise Refusal(
            "--deepspeed_mpi", ": ranks are read from RANK and WORLD_SIZE: start with torchrun instead of mpirun"
        )
    if other.deepspeed_mpi:
        config.notes.append("--deepspeed_mpi: ranks are read from RANK and WORLD_SIZE, as torchrun sets them")
    if other.deepspeed_config:
        DeepSpeedFile(other.deepspeed_config, config, assign).translate()
    elif other.deepspeed:
        config.notes.append("--deepspeed without --deepspeed_config: only the flags are read")


def _program(config: Config, assign: _Assign) -> None:
    other = config.foreign
    if other.rank is not None and config.simulation.world_size is None:
        raise Refusal(
            f"--rank {other.rank}", "needs the number of processes: add --world-size, or leave it out", LEAVE_OUT
        )
    if other.no_cuda:
        assign("run.device", "cpu", "--no-cuda")
    if other.dataloader_inter_document_masking:
        for name in ("reset_attention_mask", "reset_position_ids"):
            assign(f"data.{name}", True, "--dataloader-inter-document-masking")
    if other.eval_only is not None:
        if any(word.lower() in ("false", "0") for word in other.eval_only):
            raise Refusal(
                f"--eval-only {' '.join(other.eval_only)}",
                "also means yes in BigScience's program: leave it out",
                LEAVE_OUT,
            )
        assign("run.skip_train", True, "--eval-only")


def _precision(config: Config, assign: _Assign) -> None:
    other = config.foreign
    if other.optimizer_selection:
        assign("optimizer.optimizer", "adam", f"--optimizer-selection {other.optimizer_selection}")
    if other.o2_gradient:
        assign("parallel.grad_reduce_in_bf16", True, "--o2-gradient")
    for name in ("megatron_fsdp_main_grads_dtype", "megatron_fsdp_grad_comm_dtype"):
        if getattr(other, name) == "bf16":
            assign("parallel.grad_reduce_in_bf16", True, f"{_flag(name)} bf16")
    source = f"--main-grads-dtype {other.main_grads_dtype}"
    if other.main_grads_dtype == "bf16" and not other.use_precision_aware_optimizer:
        raise Refusal(
            source,
            "is read only with --use-precision-aware-optimizer: use --grad-reduce-in-bf16",
            Fix("--grad-reduce-in-bf16"),
        )
    if other.main_grads_dtype == "bf16":
        assign("parallel.grad_reduce_in_bf16", True, source)
    elif other.use_precision_aware_optimizer:
        config.notes.append("--use-precision-aware-optimizer: the optimizer's state is in fp32, as without the flag")


def _recompute(config: Config, assign: _Assign) -> None:
    """As in Megatron-LM 2.6, --checkpoint-activations means method uniform, by default in units of one layer."""
    other, attention = config.foreign, config.attention
    read = attention.recompute_granularity and attention.recompute_method != "block"
    if attention.recompute_num_layers == 0 and not read:
        attention.recompute_granularity = attention.recompute_method = attention.recompute_num_layers = None
        config.notes.append("--recompute-num-layers 0: no layer is recomputed")
    sources = {
        "--checkpoint-activations": "uniform" if other.checkpoint_activations else None,
        f"--activations-checkpoint-method {other.activations_checkpoint_method}": other.activations_checkpoint_method,
    }
    sources = {source: method for source, method in sources.items() if method}
    if len(set(sources.values())) > 1:
        raise Refusal(" and ".join(sources), "recompute different layers: leave one out")
    granularity = other.activations_checkpoint_granularity
    if granularity == "selective" and sources:
        raise Refusal(
            f"--activations-checkpoint-granularity selective and {next(iter(sources))}",
            "contradict each other, because the latter recomputes whole layers: leave one out",
        )
    if granularity:
        assign("attention.recompute_granularity", granularity, f"--activations-checkpoint-granularity {granularity}")
    counts = {
        "--checkpoint-num-layers": other.checkpoint_num_layers,
        "--activations-checkpoint-num-layers": other.activations_checkpoint_num_layers,
    }
    counts = {flag: count for flag, count in counts.items() if count is not None}
    for flag, count in counts.items():
        if count < 1:
            raise Refusal(f"{flag} {count}", "must be at least 1")
    if len(set(counts.values())) > 1:
        raise Refusal(" and ".join(f"{flag} {count}" for flag, count in counts.items()), "differ: leave one out")
    for source, method in sources.items():
        layers = next(iter(counts.values()), 1)
        assign("attention.recompute_granularity", "full", source)
        assign("attention.recompute_method", method, source)
        if counts or not assign.is_given("attention.recompute_num_layers"):
            with_counts = source + "".join(f" {flag} {count}" for flag, count in counts.items())
            assign("attention.recompute_num_layers", layers, with_counts)
    if counts and not sources:
        config.notes.append(
            f"{', '.join(counts)} has no effect without --checkpoint-activations or --activations-checkpoint-method"
        )
    if other.deepspeed_activation_checkpointing and not sources:
        config.notes.append(
            "--deepspeed-activation-checkpointing recomputes nothing by itself, as in Megatron-DeepSpeed: add "
            "--checkpoint-activations for less memory"
        )
    _selective(config)
    recomputed = config.attention.recompute_granularity == "full" or config.chunks.fpdt
    if other.checkpoint_in_cpu and recomputed:
        assign("chunks.offload_checkpoints", True, "--checkpoint-in-cpu")
    elif other.checkpoint_in_cpu:
        config.notes.append("--checkpoint-in-cpu has no effect: no layers are recomputed")


def _selective(config: Config) -> None:
    modules = config.foreign.recompute_modules
    if not modules or set(modules) == {"core_attn"}:
        return
    attention = config.attention
    if attention.recompute_granularity != "selective" and not attention.recompute_activations:
        config.notes.append("--recompute-modules has no effect without --recompute-granularity selective")
    else:
        config.notes.append(
            f"--recompute-modules {' '.join(modules)}: only core_attn is recomputed, with the same result; "
            "--recompute-granularity full needs less memory"
        )


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def _zero(config: Config, assign: _Assign) -> None:
    """Megatron-FSDP and PyTorch's FSDP2 become a ZeRO stage, which overlaps its messages without further flags."""
    other, parallel = config.foreign, config.parallel
    strategy = other.data_parallel_sharding_strategy
    if other.use_megatron_fsdp and other.use_torch_fsdp2:
        raise Refusal("--use-megatron-fsdp and --use-torch-fsdp2", "are two kinds of FSDP: leave one out")
    if other.use_megatron_fsdp:
        stage = STRATEGIES.index(strategy)
        source = f"--use-megatron-fsdp with --data-parallel-sharding-strategy {strategy}"
        assign("parallel.zero_stage", stage, source)
        if stage != 1 and parallel.use_distributed_optimizer:
            parallel.use_distributed_optimizer = False
            config.notes.append(f"{source} is --zero-stage {stage}; --use-distributed-optimizer is ignored")
        _overlap(config, source, stage)
    elif strategy != "no_shard":
        config.notes.append(f"--data-parallel-sharding-strategy {strategy} has no effect without --use-megatron-fsdp")
    if other.overlapped_distributed_optimizer:
        for name in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
            assign(f"parallel.{name}", True, "--overlapped-distributed-optimizer")
    if other.use_torch_fsdp2:
        source = "--use-torch-fsdp2"
        stage = 3 if other.torch_fsdp2_reshard_after_forward else 2
        assign("parallel.zero_stage", stage, source if stage == 3 else f"{source} without resharding")
        _overlap(config, source, stage)
    elif not other.torch_fsdp2_reshard_after_forward:
        config.notes.append("--torch-fsdp2-no-reshard-after-forward has no effect without --use-torch-fsdp2")


def _overlap(config: Config, source: str, stage: int) -> None:
    if stage != 1 and config.parallel.overlap_param_gather:
        config.parallel.overlap_param_gather = False
        config.notes.append(f"{source} gathers weights ahead anyway: --overlap-param-gather is ignored")


def _heads(config: Config, assign: _Assign) -> None:
    other = config.foreign
    if other.num_key_value_heads is not None:
        source = f"--num-key-value-heads {other.num_key_value_heads}"
        assign("model.num_query_groups", other.num_key_value_heads, source)
        assign("model.group_query_attention", True, source)
    if other.attention_head_type == "multiquery":
        assign("model.num_query_groups", 1, "--attention-head-type multiquery")
        assign("model.group_query_attention", True, "--attention-head-type multiquery")
    elif other.attention_head_type == "multihead" and config.model.group_query_attention:
        raise Refusal("--attention-head-type multihead and --group-query-attention", "differ: leave one out")


# Modules whose layers are megatron-core's, configured by flags such as --qk-layernorm.
PLAIN_SPECS = (["mindspeed_llm.tasks.models.spec.qwen3_spec", "layer_spec"],)
HYBRID_SPECS = (  # of pretrain_mamba.py, and of pretrain_hybrid.py
    ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"],
    ["megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"],
)


def _layers(config: Config, assign: _Assign) -> None:
    other, model = config.foreign, config.model
    if other.hybrid_layer_pattern is not None:
        _pattern(other.hybrid_layer_pattern, config, assign)
    if other.spec in HYBRID_SPECS and not model.is_hybrid_model:
        raise Refusal(f"--spec {' '.join(other.spec)}", "needs --is-hybrid-model: add it", Fix("--is-hybrid-model"))
    if other.spec and other.spec not in (*PLAIN_SPECS, *HYBRID_SPECS):
        raise Refusal(f"--spec {' '.join(other.spec)}", ": custom layers are not supported: leave it out", LEAVE_OUT)
    if other.glu_activation == "swiglu":
        assign("model.swiglu", True, "--glu-activation swiglu")
        if model.ffn_hidden_size is None and model.hidden_size is not None:
            model.ffn_hidden_size = 4 * model.hidden_size


def _pattern(pattern: str, config: Config, assign: _Assign) -> None:
    """Megatron-LM's pattern of a hybrid model, which overrides --num-layers and has the stages of the pipeline."""
    source = f"--hybrid-layer-pattern {pattern}"
    stages, layers = pattern.split("|"), pattern.replace("|", "")
    if "/" in pattern:
        raise Refusal(
            source, "has layers that predict later tokens (/), which hybrids do not have here: leave them out"
        )
    if len(stages) > 1 and {len(stage) for stage in stages} != {len(layers) // len(stages)}:
        raise Refusal(source, "has stages (|) of unequal lengths: make them equal, or leave the signs out")
    if len(stages) > 1 and len(stages) != config.parallel.pipeline_model_parallel_size:
        raise Refusal(source, f"has {len(stages)} stages (|): use --pipeline-model-parallel-size {len(stages)}")
    config.model.num_layers = len(layers)
    assign("model.is_hybrid_model", True, source)
    assign("model.hybrid_override_pattern", layers, source)


def _grid(config: Config, assign: _Assign) -> None:
    other, stages = config.foreign, config.parallel.pipeline_model_parallel_size
    if other.no_pipeline_parallel and stages > 1:
        raise Refusal(f"--no-pipeline-parallel and --pipeline-model-parallel-size {stages}", "differ: leave one out")
    if other.pp_partition_method:
        _partition(config, assign)
    if other.context_parallel_algo:
        kinds = {"ulysses_cp_algo": "a2a", "megatron_cp_algo": "p2p", "hybrid_cp_algo": "a2a+p2p"}
        kinds |= {"kvallgather_cp_algo": "all_gather"}
        kinds |= {"adaptive_cp_algo": "p2p", "hybrid_adaptive_cp_algo": "a2a+p2p"}  # rings that skip empty tiles
        source = f"--context-parallel-algo {other.context_parallel_algo}"
        assign("parallel.cp_comm_type", [kinds[other.context_parallel_algo]], source)


def _partition(config: Config, assign: _Assign) -> None:
    """DeepSpeed counts layers by the names of their classes; a tied output layer counts as an embedding."""
    method, stages = config.foreign.pp_partition_method, config.parallel.pipeline_model_parallel_size
    kinds = set(method.lower().removeprefix("type:").split("|")) if method.lower().startswith("type:") else set()
    both = kinds == {"transformer", "embedding"} and not config.model.untie_embeddings_and_output_weights
    if both and stages > 1 and config.model.num_layers and (config.model.num_layers + 2) % stages == 0:
        for name in ("embedding", "loss"):
            assign(f"parallel.account_for_{name}_in_pipeline_split", True, f"--pp-partition-method {method}")
    elif stages > 1:
        config.notes.append(f"--pp-partition-method {method}: stages hold equal numbers of layers; same result")


def _rope(config: Config, assign: _Assign) -> None:
    """MindSpeed-LLM has the constants of Llama 3.1's scaling as flags; in megatron-core they are fixed."""
    other = config.foreign
    constants = {
        "--low-freq-factor": (other.low_freq_factor, 1),
        "--high-freq-factor": (other.high_freq_factor, 4),
        "--original-max-position-embeddings": (other.original_max_position_embeddings, 8192),
    }
    for flag, (value, core) in constants.items():
        if value is not None and other.rope_scaling_type is None:
            raise Refusal(flag, "is read only with --rope-scaling-type llama3: add that, or leave it out", LEAVE_OUT)
        if value not in (None, core):
            raise Refusal(f"{flag} {value:g}", f"is not the {core} of Llama 3.1, the supported scaling: use {core}")
    if other.rope_scaling_type == "llama3":
        assign("model.use_rope_scaling", True, "--rope-scaling-type llama3")


def _checkpoints(config: Config) -> None:
    """MindSpeed-LLM converts a Hugging Face folder before training, and stops without one in --load."""
    if not config.foreign.enable_hf2mg_convert:
        return
    if config.checkpoint.load is None:
        raise Refusal("--enable-hf2mg-convert", "converts the folder of --load: add --load, or leave it out", LEAVE_OUT)
    config.checkpoint.exit_on_missing_checkpoint = True
    config.notes.append(
        f"--enable-hf2mg-convert: a Hugging Face folder in --load {config.checkpoint.load} is read as it is"
    )
