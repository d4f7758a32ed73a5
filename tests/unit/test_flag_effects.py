# SPDX-License-Identifier: Apache-2.0
"""Every setting has an effect: each flag changes exactly the values that are named here, or has a note.

There are three lists. ``EFFECTS``: with the flags left of the first ``|``, those in the middle change the values on
the right, among all values of `built_from_flags.py`. ``SHOWN``: the effect is a file, a message or a number of a run,
and another test shows it. ``IDLE``: no feature that is switched on reads the flag, and a note says so.
A setting of a kind of layers that megatron-core gets needs no row, unless it changes more than that.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import Field
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.arguments import validate
from megatron.training.arguments.parser import parse, settings, spellings
from megatron.training.arguments.suggest import accepted
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.flag import every as each
from megatron.training.settings.flag import kinds_of, name_of, reader_of
from tests.unit.built_from_flags import built

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 4 --mock-data --vocab-size 301 --attention-dropout 0 --hidden-dropout 0"
)
RANKS = 4
MLA = "--multi-latent-attention --position-embedding-type rope"
SIZES = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 8"
DSA = f"{MLA} --experimental-attention-variant dsa {SIZES}"
ROPE = "--position-embedding-type rope"
MAMBA = "--is-hybrid-model --mamba-head-dim 8"
GDN = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --normalization RMSNorm"
MOE, T2 = "--num-experts 8 --disable-bias-linear", "--tensor-model-parallel-size 2 --sequence-parallel"
FULL = "--recompute-granularity full --recompute-method"
YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor"
WSD = "--lr-decay-style WSD --lr-wsd-decay-iters"
SPARSE = "--attention-mask block-sparse"
BLOCKS = Path(__file__).with_name("data") / "attention_blocks.json"
SAMPLES = "--train-samples 80"
IN_A_ROW = "core.microbatch_group_size_per_vp_stage"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
PP = "--pipeline-model-parallel-size 2"
VIRTUAL = "core.virtual_pipeline_model_parallel_size core.pipeline_model_parallel_layout layers.num_layers"
ZERO_1 = "ddp.use_distributed_optimizer optimizer.use_distributed_optimizer zero"
HALF = "core.autocast_dtype core.params_dtype core.pipeline_dtype dtype optimizer.params_dtype"
LENGTH = "schedule.lr_decay_steps schedule.wd_incr_steps"
DECAY = "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.2"

EFFECTS = f"""
| --model llama3-8b --hidden-size 64 --num-attention-heads 8 --num-layers 4 | ...
| --num-layers 8 | core.num_layers layers.num_layers
| --hidden-size 128 | core.ffn_hidden_size core.hidden_size core.kv_channels
| --ffn-hidden-size 128 | core.ffn_hidden_size
| --num-attention-heads 4 | core.kv_channels core.num_attention_heads core.num_query_groups
| --group-query-attention | core.num_query_groups
--group-query-attention | --num-query-groups 4 | core.num_query_groups
| --kv-channels 16 | core.kv_channels
| --max-position-embeddings 128 | model.max_sequence_length positions
| --position-embedding-type rope | model.position_embedding_type positions rope
| --position-embedding-type alibi | model.position_embedding_type positions alibi
--position-embedding-type rope | --rotary-base 5000 | rope
--position-embedding-type rope | --rotary-percent 0.5 | rope
--position-embedding-type rope | --rotary-interleaved | rope
--position-embedding-type rope | --rotary-seq-len-interpolation-factor 2 | rope
--position-embedding-type rope | --use-rope-scaling | rope
--position-embedding-type rope --use-rope-scaling | --rope-scaling-factor 4 | rope
{YARN} 4 | --yarn-rotary-scaling-factor 8 | rope
{YARN} 4 | --yarn-original-max-position-embeddings 16 | rope
{YARN} 4 | --yarn-beta-fast 16 | rope
{YARN} 4 | --yarn-beta-slow 2 | rope
{YARN} 4 | --yarn-mscale 0.7 | rope
{YARN} 4 | --yarn-mscale-all-dim 0.7 | rope
{YARN} 4 | --no-yarn-correction-range-round-to-int | rope
| --normalization RMSNorm | core.normalization
| --norm-epsilon 1e-3 | core.layernorm_epsilon
| --apply-layernorm-1p | core.layernorm_zero_centered_gamma
| --swiglu | core.activation_func core.ffn_hidden_size core.gated_linear_unit
| --geglu | core.ffn_hidden_size core.gated_linear_unit
| --quick-geglu | core.activation_func core.ffn_hidden_size core.gated_linear_unit
--swiglu | --glu-linear-offset 1 | core.glu_linear_offset
--swiglu | --activation-func-clamp-value 7 | core.activation_func_clamp_value
| --squared-relu | core.activation_func
| --no-bias-gelu-fusion | core.activation_func
--no-bias-gelu-fusion | --openai-gelu | core.activation_func
| --disable-bias-linear | core.activation_func core.add_bias_linear
| --untie-embeddings-and-output-weights | model.share_embeddings_and_output_weights
| --init-method-std 0.1 | weights
| --init-method-xavier-uniform | weights
| --seed 2 | dropout.seed weights
| --deterministic-mode | core.deterministic_mode
| --transformer-impl transformer_engine | layers.transformer_engine
| --add-qkv-bias | core.add_qkv_bias
| --qk-layernorm | core.qk_layernorm
| --softmax-type learnable | core.softmax_type
| --softmax-scale 0.5 | core.softmax_scale
--normalization RMSNorm | --qk-layernorm-all-heads | layers.all_heads_norms
| --attention-output-gate | core.attention_output_gate
| --attn-logit-softcapping 50 | softcap
| --final-logit-softcapping 30 | model.softcap
| --sandwich-norm | layers.output_norms
| --reordered-norm | layers.input_norms layers.output_norms
| --parallel-residual | layers.parallel_residual
| --scale-embeddings | factor-of-embeddings
| --embedding-multiplier 12 | factor-of-embeddings
| --residual-multiplier 0.2 | layers.residual_multiplier
| --logits-scaling 8 | layers.final_scale
| --hidden-dropout 0.2 | dropout.hidden
| --attention-dropout 0.2 | dropout.attention
| {MOE} | core.num_moe_experts core.moe_ffn_hidden_size layers.experts ...
{MOE} | --moe-layer-freq 2 | core.moe_layer_freq layers.experts
{MOE} | --moe-shared-expert-intermediate-size 32 | core.moe_shared_expert_intermediate_size
{MOE} --moe-shared-expert-intermediate-size 32 | --moe-shared-expert-gate | core.moe_shared_expert_gate
{MOE} | --moe-router-topk 4 | core.moe_router_topk layers.experts
{MOE} | --moe-router-score-function sigmoid | core.moe_router_score_function layers.experts
{MOE} | --moe-router-pre-softmax | core.moe_router_pre_softmax layers.experts
{MOE} | --moe-router-num-groups 4 --moe-router-group-topk 2 | layers.experts
{MOE} | --moe-router-topk-scaling-factor 2.5 | layers.experts
{MOE} --moe-router-score-function sigmoid | --moe-router-enable-expert-bias | layers.experts
{MOE} --moe-aux-loss-coeff 0.1 | --moe-router-load-balancing-type seq_aux_loss | layers.experts
{MOE} | --moe-aux-loss-coeff 0.1 | layers.experts
{MOE} | --moe-z-loss-coeff 0.1 | layers.experts
{MOE} | --moe-expert-capacity-factor 1.5 | core.moe_expert_capacity_factor layers.experts
{MOE} --moe-expert-capacity-factor 1.5 | --moe-token-drop-policy position | layers.experts
{MOE} {FULL} uniform --recompute-num-layers 1 | --moe-enable-routing-replay | layers.experts
{MOE} {T2} | --expert-tensor-parallel-size 1 | core.expert_tensor_parallel_size
| {MLA} | core.multi_latent_attention core.kv_channels ...
{MLA} | --qk-layernorm | layers.mixers
{MLA} --qk-layernorm | --latent-norm-epsilon 1e-3 | layers.mixers
{MLA} --rotary-scaling-factor 4 | --rope-type rope | rope ...
{MLA} | --qk-head-dim 16 | core.qk_head_dim core.softmax_scale
{MLA} | --qk-pos-emb-head-dim 16 | core.qk_pos_emb_head_dim core.softmax_scale rope
{MLA} | --v-head-dim 16 | core.v_head_dim core.kv_channels
{MLA} --rope-type rope | --rotary-base 5000 | rope
{MLA} --position-embedding-type yarn --rotary-scaling-factor 4 | --mscale 0.5 | rope
{DSA} --dsa-indexer-topk-freq 2 | --dsa-indexer-skip-topk-offset 2 | layers.mixers
{DSA} | --dsa-indexer-rope-interleaved | layers.mixers
{DSA} | --dsa-indexer-k-norm-epsilon 1e-3 | layers.mixers
| {GDN} | layers.mixers core.linear_attention_freq ...
{GDN} | --linear-attention-freq 2 | layers.mixers core.linear_attention_freq
{GDN} | --linear-attention-exchange relay | layers.mixers
{GDN} | --linear-attention-kernel blocks | linear-kernel
| {MAMBA} | core.is_hybrid_model layers.pattern ...
{MAMBA} | --hybrid-override-pattern M*-M | layers.mixers layers.pattern
{MAMBA} | --hybrid-attention-ratio 0.5 | layers.mixers layers.pattern
{MAMBA} | --hybrid-mlp-ratio 0.5 | layers.mixers layers.pattern
{MAMBA} | --mamba-head-dim 4 | core.mamba_head_dim core.mamba_num_heads
{MAMBA} | --mamba-dt-min 0.01 | layers.mixers
{ROPE} | --mtp-num-layers 1 | core.mtp_num_layers ...
| --lora-rank 8 | layers.lora
--lora-rank 8 | --lora-alpha 16 | layers.lora
--lora-rank 8 | --lora-targets linear_fc2 linear_qkv | layers.lora
| --make-vocab-size-divisible-by 64 | rows
| --padded-vocab-size 400 | rows
| --fp8-format hybrid | core.fp8 layers.transformer_engine
--fp8-format hybrid | --fp8-recipe tensorwise | core.fp8_recipe
--fp8-format hybrid | --fp8-amax-history-len 4 | core.fp8_amax_history_len
--fp8-format hybrid | --fp8-amax-compute-algo max | core.fp8_amax_compute_algo
| --tensor-model-parallel-size 2 | core.tensor_model_parallel_size grid micro-batches rows ...
--tensor-model-parallel-size 2 | --sequence-parallel | core.sequence_parallel
| --context-parallel-size 4 | core.context_parallel_size grid layout micro-batches
| --ulysses-parallel-size 4 | core.context_parallel_size grid layout micro-batches
| --ring-parallel-size 4 | core.context_parallel_size grid layout micro-batches
| --hierarchical-context-parallel-sizes 2 2 | core.context_parallel_size grid layout micro-batches
--context-parallel-size 4 | --cp-comm-type p2p | grid layout
--ring-parallel-size 4 --context-parallel-size 4 | --cp-comm-type all_gather | gathered-keys
--ring-parallel-size 4 | --context-parallel-balance contiguous | balance layout
| --pipeline-model-parallel-size 2 | core.pipeline_model_parallel_size layers.num_layers grid micro-batches ...
{PP} | --decoder-first-pipeline-num-layers 1 | core.pipeline_model_parallel_layout layers.num_layers
{PP} | --decoder-last-pipeline-num-layers 1 | core.pipeline_model_parallel_layout layers.num_layers
{PP} | --pipeline-model-parallel-layout Et|tttL | core.pipeline_model_parallel_layout layers.num_layers
{PP} | --num-layers-per-virtual-pipeline-stage 1 | {VIRTUAL}
{PP} --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8 | {GROUP} 4 | {IN_A_ROW}
{PP} | --num-virtual-stages-per-pipeline-rank 2 | {VIRTUAL}
| --zero-stage 1 | {ZERO_1}
| --zero-stage 3 | ddp.fsdp zero ...
| --use-distributed-optimizer | {ZERO_1}
| --overlap-grad-reduce | ddp.overlap_grad_reduce
--zero-stage 1 --overlap-grad-reduce | --overlap-param-gather | ddp.overlap_param_gather optimizer.overlap_param_gather
| --ddp-bucket-size 1000 | ddp.bucket_size
--bf16 | --grad-reduce-in-bf16 | ddp.grad_reduce_in_fp32
| --attention-kernel math | attention-kernel
| --attention-block-sizes {BLOCKS} | attention-blocks
| --attention-mask full | mask
| --window-size 7,0 | balance mask
--window-size 7,0 | --window-global-tokens 2 | mask
--window-size 7,0 | --window-attn-skip-freq 2 | balance rules
--position-embedding-type rope | --no-rope-freq 2 | rules
--position-embedding-type rope --window-size 7,0 --window-attn-skip-freq 2 | --rotary-base-local 500 | rules
{SPARSE} | --sparse-block-size 16 | mask
{SPARSE} | --sparse-pattern strided | balance mask
{SPARSE} | --sparse-window-blocks 1 | mask
{SPARSE} | --sparse-global-blocks 2 | mask
{SPARSE} --sparse-pattern bigbird | --sparse-random-blocks 1 | mask
{SPARSE} --sparse-pattern strided | --sparse-stride 2 | mask
| --mask-cpu-threshold 8 | mask-threshold
| --recompute-granularity selective | core.recompute_granularity
| --recompute-activations | core.recompute_granularity
{FULL} uniform --recompute-num-layers 1 | --recompute-method block | core.recompute_method
{FULL} uniform --recompute-num-layers 1 | --keep-attention | kept-attention
{FULL} uniform --recompute-num-layers 1 | --recompute-num-layers 2 | core.recompute_num_layers
| --fpdt --fpdt-chunk-size 16 | attention-chunks ffn-chunks in-chunks loss-chunks host-memory
--fpdt --fpdt-chunk-size 16 | --fpdt-chunk-size 32 | attention-chunks ffn-chunks
--fpdt --fpdt-chunk-size 16 | --no-fpdt-offload | host-memory
--fpdt --fpdt-chunk-size 16 | --fpdt-stream-hidden | streamed
--fpdt --fpdt-chunk-size 16 | --offload-checkpoints | layer-inputs-in-host-memory
--ulysses-parallel-size 2 | --partition-position-embedding | model.position_embedding_type partitioned
| --ffn-chunks 2 | ffn-chunks in-chunks host-memory
| --loss-chunks 2 | loss-chunks
| --optimizer sgd | optimizer.optimizer
| --lr 1e-2 | optimizer.lr schedule.max_lr
| --min-lr 1e-4 | optimizer.min_lr schedule.min_lr
| --lr-decay-style cosine | schedule.lr_decay_style
| --lr-decay-iters 10 | schedule.lr_decay_steps
{SAMPLES} | --lr-decay-samples 40 | schedule.lr_decay_steps
| --lr-decay-tokens 2560 | {LENGTH}
| --lr-warmup-fraction 0.1 | schedule.lr_warmup_steps
| --lr-warmup-iters 2 | schedule.lr_warmup_steps
{SAMPLES} | --lr-warmup-samples 8 | schedule.lr_warmup_steps
| --lr-warmup-tokens 128 | {LENGTH} schedule.lr_warmup_steps
--lr-warmup-iters 2 | --lr-warmup-init 1e-5 | schedule.init_lr
{WSD} 4 | --lr-wsd-decay-style linear | schedule.lr_wsd_decay_style
{WSD} 4 | --lr-wsd-decay-iters 8 | schedule.wsd_decay_steps
{SAMPLES} --lr-decay-style WSD --lr-wsd-decay-samples 8 | --lr-wsd-decay-samples 16 | schedule.wsd_decay_steps
| --decoupled-lr 1e-2 | optimizer.decoupled_lr
--decoupled-lr 1e-2 | --decoupled-min-lr 1e-3 | optimizer.decoupled_min_lr
| --weight-decay 0.1 | optimizer.weight_decay schedule.end_wd schedule.start_wd
{DECAY} | --start-weight-decay 0.05 | schedule.start_wd
{DECAY} | --end-weight-decay 0.3 | schedule.end_wd
{DECAY} | --weight-decay-incr-style cosine | schedule.wd_incr_style
--load a | --override-opt-param-scheduler | schedule.override_opt_param_scheduler
--load a | --use-checkpoint-opt-param-scheduler | schedule.use_checkpoint_opt_param_scheduler
| --apply-wd-to-qk-layernorm | optimizer.apply_wd_to_qk_layernorm
| --clip-grad 0.5 | optimizer.clip_grad
| --adam-beta1 0.8 | optimizer.adam_beta1
| --adam-beta2 0.8 | optimizer.adam_beta2
| --adam-eps 1e-6 | optimizer.adam_eps
--optimizer sgd | --sgd-momentum 0.5 | optimizer.sgd_momentum
| --bf16 | core.bf16 optimizer.bf16 {HALF}
| --fp16 | core.fp16 optimizer.fp16 {HALF}
| --loss-scale 8 | optimizer.loss_scale
--fp16 | --initial-loss-scale 8 | optimizer.initial_loss_scale
--fp16 | --min-loss-scale 2 | optimizer.min_loss_scale
--fp16 | --loss-scale-window 10 | optimizer.loss_scale_window
--fp16 | --hysteresis 3 | optimizer.hysteresis
--global-batch-size 8 | --micro-batch-size 2 | micro-batches
| --global-batch-size 8 | micro-batches samples {LENGTH}
WITHOUT --global-batch-size | --gradient-accumulation-steps 3 | micro-batches samples {LENGTH}
--global-batch-size 8 | --rampup-batch-size 4 4 10 | micro-batches samples {LENGTH}
| --seq-length 32 | layout
| --log-num-zeros-in-grad | optimizer.log_num_zeros_in_grad
--train-iters 20 | --train-iters 10 | iterations samples {LENGTH}
{SAMPLES} | --train-samples 40 | iterations samples {LENGTH}
| --train-tokens 2560 | iterations samples {LENGTH}
| --eval-interval 5 | evaluations
"""

# Settings whose effect is a file, a message or a number of a run are shown by another test, which names them.
TESTS = Path(__file__).parents[1]
NAME_ALL = {"test_flag_effects.py", "test_check_script.py", "test_help.py", "test_same_network.py"}  # or very many
ELSEWHERE = [
    path.read_text()
    for path in (*TESTS.glob("unit/test_*.py"), *TESTS.glob("distributed/test_*.py"), *TESTS.glob("faults/test_*.py"))
    if path.name not in NAME_ALL
]
ALWAYS = {"exit_signal_handler"}  # its help says that it is always on


def rows() -> list[tuple[str, str, str]]:
    return [tuple(part.strip() for part in re.split(r"(?:^| )\| ", line)) for line in EFFECTS.strip().splitlines()]


@cache
def built_values(flags: str) -> dict[str, Any]:
    words = BASE.split()
    if flags.startswith("WITHOUT "):
        at = words.index(flags.split()[1])
        del words[at : at + 2]
        flags = " ".join(flags.split()[2:])
    duration = "" if "--train-" in flags else "--train-iters 20"
    return built(parse([*words, *flags.split(), *duration.split()], world_size=RANKS), RANKS)


@pytest.fixture(autouse=True)
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Transformer Engine is installed; only configurations are built, no layers."""
    monkeypatch.setattr(validate, "transformer_engine_installed", lambda: True)


@pytest.mark.parametrize(("context", "flags", "changed"), rows(), ids=[f"{c} | {f}".strip(" |") for c, f, _ in rows()])
def test_a_flag_changes_the_listed_values(context: str, flags: str, changed: str):
    if "--train-" in flags and "--train-" not in context:
        context = f"{context} --train-iters 20"
    before, after = built_values(context.strip()), built_values(f"{context} {flags}".strip())
    results = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    expected = set(changed.split()) - {"..."}
    assert expected <= results and (results == expected or "..." in changed.split()), sorted(results)


PROBED = {word for _, flags, _ in rows() for word in flags.split() if word.startswith("--")}
CORES = [field for _, _, field in settings() if field.metadata.get("core")]
OF_KINDS = [field for field in CORES if kinds_of(field) and name_of(field) not in PROBED]


def values_of(field: Field, default: Any) -> list[list[str]]:
    """Other values that the flag may have."""
    if field.type == "bool":
        return [[]]
    if choices := field.metadata.get("choices"):
        return [[str(one)] for one in choices if one != default]
    return [[str(reader_of(field)((default or 4) * factor))] for factor in (2, 0.5)]


@pytest.mark.parametrize("field", OF_KINDS, ids=lambda field: field.name)
def test_a_setting_of_a_kind_of_layers_reaches_megatron_core(field: Field):
    """In a model with such layers, which the first accepted command line gives; the value is the first accepted one."""
    kind = kinds_of(field)[0]
    value = [] if kind.value or "bool" in ModelConfig.__dataclass_fields__[kind.switch].type else ["4"]
    words = [*BASE.split(), "--train-iters", "20", *kind.flag.split(), *value]
    try:
        config = parse(words, world_size=RANKS)
    except Refusal as refusal:
        words = accepted(refusal, words, partial(parse, world_size=RANKS))
        config = parse(words, world_size=RANKS)
    (default,) = (getattr(part, field.name) for _, part, one in config.settings() if one.name == field.name)
    for value in values_of(field, default):
        with suppress(Refusal):
            changed = parse([*words, name_of(field), *value], world_size=RANKS)
            break
    before, after = built(config, RANKS), built(changed, RANKS)
    name = field.name if field.metadata["core"] is True else field.metadata["core"]
    assert {one for one in {*before, *after} if before.get(one) != after.get(one)} == {f"core.{name}"}


def names(flag: str, field: str, text: str) -> bool:
    return re.search(rf"{flag}(?![\w-])|\b{field}\b", text) is not None


def test_every_setting_has_a_test_of_its_effect():
    own = Path(__file__).read_text()
    for _, _, field in settings():
        flag = spellings(field)[0]
        if flag in PROBED or field in OF_KINDS or field.name in ALWAYS or re.search(rf"{flag}(?![\w-])", own):
            continue
        assert any(names(flag, field.name, text) for text in ELSEWHERE), f"test what {flag} does"


# ---- flags without a reader


@pytest.mark.parametrize(
    "flags",
    [
        "--rotary-base 5000 --rotary-percent 0.5 --rotary-interleaved --use-rope-scaling",
        "--rope-scaling-factor 4 --position-embedding-type rope",
        "--no-bias-gelu-fusion --swiglu",
        "--spike-factor 3",
        "--init-method-std 0.1 --init-method-xavier-uniform",
        "--make-vocab-size-divisible-by 64 --padded-vocab-size 400",
        "--fp8-recipe tensorwise",
        "--fp8-amax-history-len 4 --fp8-amax-compute-algo max --fp8-format hybrid --fp8-recipe tensorwise",
        "--ddp-bucket-size 1000 --overlap-grad-reduce --zero-stage 3",
        "--adam-beta1 0.8 --adam-beta2 0.8 --adam-eps 1e-6 --optimizer sgd",
        "--sgd-momentum 0.5",
        "--initial-loss-scale 8 --min-loss-scale 2 --loss-scale-window 10 --hysteresis 3",
        "--initial-loss-scale 8 --fp16 --loss-scale 4",
        "--no-check-for-nan-in-loss-and-grad --fp16",
        "--lr-wsd-decay-style linear --lr-wsd-decay-iters 4",
        "--min-lr 1e-5 --lr-decay-style constant",
        "--no-load-optim --no-load-rng --override-opt-param-scheduler",
        "--no-save-optim --no-save-rng",
        "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir a --replication",
        "--replication-jump 2 --replication-factor 3",
        "--split 9,1,0 --data-cache-path a --num-dataset-builder-threads 2",
        "--vocab-file a --merge-file b --tokenizer-type NullTokenizer",
        "--fim-rate 0.1 --fim-spm-rate 0.1 --fim-no-prefix a --fim-pad-token b",
        "--tiktoken-pattern v2 --tiktoken-num-special-tokens 5",
        "--sft-tokenizer-prompt-format a --sft-over-length skip",
        "--lora-alpha 3 --lora-targets linear_qkv",
        "--mtp-loss-scaling-factor 0.3",
        "--q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --rope-type rope",
        "--moe-router-topk 3 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2",
        "--tokenizer-model a --tokenizer-type NullTokenizer",
        "--tensorboard-log-interval 5 --tensorboard-queue-size 5",
        "--wandb-exp-name a --wandb-save-dir b --wandb-entity c",
        "--mlflow-run-name a --mlflow-tracking-uri b",
        "--memory-snapshot-path c --profile --device cuda",
        "--profile-step-start 3 --profile-step-end 5 --profile-ranks 1",
        "--use-pytorch-profiler --record-shapes",
        "--pytorch-profiler-collect-callstack --profile --device cuda",
    ],
)
def test_settings_that_nothing_reads_get_a_note(flags: str):
    """The note names the first flag and others with the same reader; flags that are read have no note."""
    config = parse(f"{BASE} --train-iters 20 {flags}".split(), world_size=RANKS)
    (note,) = [note for note in config.notes if "no effect here" in note]
    by_text = {one.text: one for _, _, field in settings() for one in each(field, "read_with")}
    reader = by_text[note.partition("(")[2].removesuffix(")")]
    named = [spelling for _, _, field in settings() for spelling in spellings(field)[:1] if names(spelling, "-", note)]
    wanted = [flag for flag in re.findall(r"--[\w-]+", flags) if flag in note.split("(")[0]]
    assert wanted and flags.split()[0] in wanted and set(wanted) <= set(named) and not reader.holds(config)


def test_settings_that_are_read_get_no_note():
    flags = "--rotary-base 5000 --position-embedding-type rope --adam-beta1 0.8 --fp16 --initial-loss-scale 8"
    config = parse(f"{BASE} --train-iters 20 {flags}".split(), world_size=RANKS)
    assert not [note for note in config.notes if "no effect" in note]


# ---- values passed to other libraries


def test_process_groups(monkeypatch: pytest.MonkeyPatch):
    """--distributed-timeout-minutes, --distributed-backend and --network-interface reach the code that makes groups."""
    from megatron.training import setup

    class Called(Exception):
        pass

    def record(**arguments: Any) -> None:
        raise Called(arguments)

    def arguments_of(flags: str) -> dict[str, Any]:
        with pytest.raises(Called) as caught:
            setup.start(parse(f"{BASE} --train-iters 20 --device cpu {flags}".split(), world_size=1))
        return caught.value.args[0]

    worlds: list[tuple] = []
    monkeypatch.setattr(setup, "initialize_world", lambda *arguments: worlds.append(arguments) or "")
    monkeypatch.setattr(setup, "initialize_grid", record)
    assert (
        arguments_of("")["timeout_minutes"] == 10
        and arguments_of("--distributed-timeout-minutes 3")["timeout_minutes"] == 3
    )
    assert arguments_of("--distributed-backend gloo")["backend"] == "gloo"
    assert arguments_of("--network-interface eth0") and worlds == [
        ("gloo", minutes, None) for minutes in (10, 3, 10)
    ] + [("gloo", 10, "eth0")]
    with pytest.raises(Refusal, match="--distributed-backend nccl"):
        arguments_of("--distributed-backend nccl")


def test_loggers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """--wandb-*, --mlflow-*, --tensorboard-*, --no-progress and --peak-tflops reach the code that writes logs.

    All logs have the same names.
    """
    import torch
    from torch.utils import tensorboard

    from megatron.training.report import mfu, reporter

    seen: dict[str, Any] = {}
    names: dict[str, set[str]] = {"tensorboard": set(), "wandb": set(), "mlflow": set()}
    wandb = SimpleNamespace(
        init=lambda **arguments: (
            seen.update(arguments) or SimpleNamespace(log=lambda values, **__: names["wandb"].update(values))
        )
    )
    mlflow = SimpleNamespace(
        set_tracking_uri=lambda uri: seen.update(uri=uri),
        set_experiment=lambda name: seen.update(experiment=name),
        start_run=lambda run_name: seen.update(run=run_name),
        log_params=lambda params: seen.update(params=params),
        log_metrics=lambda values, step: names["mlflow"].update(values),
    )
    points: list[int] = []
    writer = SimpleNamespace(add_scalar=lambda name, value, step: (points.append(step), names["tensorboard"].add(name)))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(
        tensorboard, "SummaryWriter", lambda path, max_queue, purge_step: seen.update(queue=max_queue) or writer
    )
    monkeypatch.setattr(reporter, "tqdm", lambda **_: SimpleNamespace(update=print, set_postfix=lambda **_: None))
    monkeypatch.setattr(reporter.sys, "stderr", SimpleNamespace(isatty=lambda: True))
    flags = (
        f"--wandb-project a --wandb-exp-name b --wandb-save-dir c --wandb-entity d --tensorboard-dir {tmp_path} "
        "--tensorboard-queue-size 7 --tensorboard-log-interval 2 --peak-tflops 3 --log-interval 100 "
        "--mlflow-experiment e --mlflow-run-name f --mlflow-tracking-uri g"
    )
    for more, bar in (("", True), ("--no-progress", False)):
        config = parse(f"{BASE} --train-iters 20 {flags} {more}".split(), world_size=1)
        report = reporter.Reporter(config, active=True, first_iteration=0, last_iteration=20)
        assert (report.bar is not None) == bar
    for iteration in (1, 2, 3, 4):
        row = {"iteration": iteration, "lm_loss": 1.0}
        report.step(row, learning_rate=1.0, loss_scale=1.0, extra={})
    assert (seen["project"], seen["name"], seen["dir"], seen["entity"], seen["queue"]) == ("a", "b", "c", "d", 7)
    assert (seen["experiment"], seen["run"], seen["uri"]) == ("e", "f", "g")
    assert seen["params"]["optimizer.lr"] == config.optimizer.lr
    assert set(points) == {2, 4} and all(own == {"lm_loss", "learning_rate"} for own in names.values())
    assert mfu.peak_flops(config, torch.device("cpu")) == 3e12


def test_exit_duration_in_mins(monkeypatch: pytest.MonkeyPatch):
    import torch

    from megatron.training.features import stopping

    monkeypatch.setattr(stopping.dist, "all_reduce", lambda *_, **__: None)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now)
    for minutes, later, stopped in ((2, 119, False), (2, 121, True), (None, 10**6, False)):
        now = 0
        stopper = stopping.Stopper(torch.device("cpu"), minutes)
        now = later
        stopper.agree()
        stopper.restore()
        assert stopper.stopped == stopped


def test_dry_run_every_layer(monkeypatch: pytest.MonkeyPatch):
    from megatron.simulator import command
    from megatron.simulator.dry_run import dry_run

    class Called(Exception):
        pass

    def record(*args: Any, every_layer: bool, **kwargs: Any) -> None:
        raise Called(every_layer)

    monkeypatch.setattr(dry_run, "dry_run", record)
    for flags, every in (("", False), ("--dry-run-every-layer", True)):
        with pytest.raises(Called) as caught:
            command.simulate(parse(f"{BASE} --dry-run {flags}".split(), world_size=1))
        assert caught.value.args == (every,)


def test_dry_run_trace_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from megatron.simulator import command
    from megatron.simulator.dry_run import dry_run, dry_run_report, timeline

    arguments: list[int] = []
    monkeypatch.setattr(timeline, "write_trace", lambda result, path, most: arguments.append(most))
    results = SimpleNamespace(ranks=[], machine="A100-80G", fits=True)
    monkeypatch.setattr(dry_run, "dry_run", lambda *args, **options: results)
    monkeypatch.setattr(dry_run_report, "show", lambda *args: None)
    monkeypatch.setattr(dry_run_report, "as_json", lambda result: {})
    monkeypatch.setattr(dry_run_report, "draw", lambda *args, **options: None)
    simulated = f"{BASE} --dry-run --gpu A100-80G --dry-run-json {tmp_path / 'result.json'}"
    for flags in ("", "--dry-run-trace-events 50"):
        command.simulate(parse(f"{simulated} {flags}".split(), world_size=1))
    assert arguments == [timeline.MOST_EVENTS, 50]
    for flags in ("--dry-run-trace-events 50", "--dry-run --dry-run-trace-events 50"):
        with pytest.raises(Refusal, match="--dry-run-trace-events"):
            parse(f"{BASE} {flags}".split(), world_size=1)
    with pytest.raises(Refusal, match="at least 1"):
        parse(f"{simulated} --dry-run-trace-events 0".split(), world_size=1)


@pytest.mark.parametrize(
    ("flags", "chosen", "here", "notice"),
    [
        ("", "cpu", (9, 0),
         "is for the kernel triton, but attention uses cpu: leave it out, or add --attention-kernel"),
        ("", "triton", (9, 0), "its sizes are not for fp32"),
        ("--bf16 --position-embedding-type alibi", "triton", (9, 0), "its sizes are not for ALiBi"),
        ("--bf16 --attn-logit-softcapping 5", "triton", (9, 0), "its sizes are not for a soft-cap"),
        ("--bf16 --attention-dropout 0.1", "triton", (9, 0), "its sizes are not for attention dropout"),
        ("--bf16 --window-size 7,0", "triton", (9, 0), "its sizes are not for masks of pairs"),
        ("--bf16", "triton", (8, 0), "was measured on a GPU of capability 9.0, but this one has 8.0: measure this one"),
        ("--bf16", "triton", (9, 0), None),
    ],
)  # fmt: skip
def test_attention_block_sizes_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, flags, chosen, here, notice
):
    import torch

    from megatron import platform
    from megatron.training import setup

    class Started(Exception):
        pass

    def world(*_: Any) -> None:
        raise Started

    gpu = SimpleNamespace(on_gpu=True, simulated=False, device=torch.device("cuda"), backend="nccl")
    monkeypatch.setattr(platform, "select", lambda *_: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: here)
    monkeypatch.setattr(setup, "_kernel", lambda *_: chosen)
    monkeypatch.setattr(setup, "initialize_world", world)
    config = parse(f"{BASE} --train-iters 20 --attention-block-sizes {BLOCKS} {flags}".split(), world_size=1)
    with pytest.raises(Refusal if notice else Started, match=notice and re.escape(notice)):
        setup.start(config)


@pytest.mark.parametrize(
    ("text", "notice"),
    [
        (None, "cannot be read"),
        ("{", "not JSON"),
        ('{"capability": [9, 0]}', "has no attention_blocks: write it with tools/measure_hardware.py --attention"),
        ('{"attention_blocks": {}}', "capability: must be [major, minor]"),
        ('{"capability": [9, 0], "attention_blocks": {"keys": 3}}', "attention_blocks.keys: must be an object"),
    ],
)
def test_bad_files_of_attention_block_sizes_are_refused(tmp_path: Path, text: str | None, notice: str):
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    config = parse(f"{BASE} --train-iters 20 --attention-block-sizes {path}".split(), world_size=RANKS)
    with pytest.raises(Refusal, match=re.escape(f"--attention-block-sizes {path}: ") + f".*{re.escape(notice)}"):
        built(config, RANKS)
