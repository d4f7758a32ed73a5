# SPDX-License-Identifier: Apache-2.0
"""Flags of older Megatron-LM, Megatron-DeepSpeed, NeMo and Megatron-FSDP, and the settings that they become."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config, ForeignConfig

RUN = (
    "--num-layers 8 --hidden-size 96 --num-attention-heads 12 --seq-length 192 --max-position-embeddings 192 "
    "--micro-batch-size 1 --attention-dropout 0 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 99"
)


def build(flags: str, world_size: int = 1) -> Config:
    config = parse(f"{RUN} {flags}".split(), world_size=world_size)
    assert config.foreign == ForeignConfig()
    return config


def same(theirs: str, ours: str, world_size: int = 1) -> Config:
    """Both command lines give the same configuration, except for notes."""
    first, second = build(theirs, world_size), build(ours, world_size)
    first.notes = second.notes = []
    assert first == second
    return first


def refused(flags: str, *words: str, world_size: int = 1) -> None:
    with pytest.raises(Refusal) as caught:
        build(flags, world_size)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


FULL = "--recompute-granularity full --recompute-method"


# ---- recompute


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--checkpoint-activations", f"{FULL} uniform --recompute-num-layers 1"),
        ("--checkpoint-activations --checkpoint-num-layers 4", f"{FULL} uniform --recompute-num-layers 4"),
        ("--checkpoint-activations --deepspeed-activation-checkpointing", f"{FULL} uniform --recompute-num-layers 1"),
        ("--activations-checkpoint-method uniform", f"{FULL} uniform --recompute-num-layers 1"),
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            f"{FULL} block --recompute-num-layers 3",
        ),
        (
            "--activations-checkpoint-granularity full --activations-checkpoint-method block "
            "--activations-checkpoint-num-layers 2",
            f"{FULL} block --recompute-num-layers 2",
        ),
        ("--activations-checkpoint-granularity selective", "--recompute-granularity selective"),
        ("--recompute-activations --recompute-modules core_attn", "--recompute-activations"),
        (
            "--checkpoint-activations --checkpoint-in-cpu",
            f"{FULL} uniform --recompute-num-layers 1 --offload-checkpoints",
        ),
        ("--fpdt --fpdt-chunk-size 64 --checkpoint-in-cpu", "--fpdt --fpdt-chunk-size 64 --offload-checkpoints"),
        (
            f"--checkpoint-activations {FULL} uniform --recompute-num-layers 2",
            f"{FULL} uniform --recompute-num-layers 2",
        ),
    ],
)
def test_recompute(theirs: str, ours: str):
    config = same(theirs, ours)
    assert config.attention.recompute_granularity is not None or config.chunks.fpdt


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--checkpoint-activations --activations-checkpoint-method block", ("--checkpoint-activations", "block")),
        ("--checkpoint-activations --recompute-granularity selective", ("--checkpoint-activations", "selective")),
        (f"--checkpoint-activations {FULL} block --recompute-num-layers 1", ("--checkpoint-activations", "block")),
        (
            f"--checkpoint-activations --checkpoint-num-layers 2 {FULL} uniform --recompute-num-layers 1",
            ("--checkpoint-num-layers 2", "--recompute-num-layers 1"),
        ),
        (
            "--checkpoint-activations --checkpoint-num-layers 2 --activations-checkpoint-num-layers 3",
            ("--checkpoint-num-layers 2", "--activations-checkpoint-num-layers 3"),
        ),
        ("--checkpoint-activations --checkpoint-num-layers 0", ("--checkpoint-num-layers 0", "at least 1")),
        (
            "--activations-checkpoint-granularity selective --activations-checkpoint-method block",
            ("--activations-checkpoint-granularity selective", "block"),
        ),
        (
            "--activations-checkpoint-granularity full --recompute-granularity selective",
            ("--activations-checkpoint-granularity full", "--recompute-granularity selective"),
        ),
        ("--recompute-activations --checkpoint-activations", ("--recompute-activations", "full")),
    ],
)
def test_recompute_that_contradicts_itself(flags: str, words: tuple[str, ...]):
    refused(flags, *words)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--deepspeed-activation-checkpointing", "recomputes nothing by itself"),
        ("--checkpoint-num-layers 2", "--checkpoint-num-layers has no effect"),
        ("--checkpoint-in-cpu", "--checkpoint-in-cpu has no effect"),
        ("--recompute-modules mlp", "--recompute-modules has no effect"),
        ("--recompute-activations --recompute-modules core_attn layernorm", "core_attn layernorm: only core_attn"),
    ],
)
def test_recompute_without_effect_is_noted(flags: str, word: str):
    assert any(word in note for note in build(flags).notes)


# ---- ZeRO and FSDP


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--use-megatron-fsdp", "--zero-stage 0"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "--zero-stage 1"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "--zero-stage 2"),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params", "--zero-stage 3"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer "
            "--overlap-grad-reduce --overlap-param-gather --ckpt-format fsdp_dtensor --fsdp-double-buffer",
            "--zero-stage 3 --overlap-grad-reduce",
        ),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather",
            "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather",
        ),
        ("--use-torch-fsdp2 --zero-stage 3 --ckpt-format torch_dcp", "--zero-stage 3"),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "--zero-stage 2"),
    ],
)
def test_fsdp(theirs: str, ours: str):
    same(f"--bf16 {theirs}", f"--bf16 {ours}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --zero-stage 3",
            ("--use-megatron-fsdp", "--zero-stage 2", "--zero-stage 3"),
        ),
        ("--use-torch-fsdp2 --zero-stage 1", ("--use-torch-fsdp2", "--zero-stage 3", "--zero-stage 1")),
        ("--use-torch-fsdp2 --use-megatron-fsdp", ("--use-torch-fsdp2", "--use-megatron-fsdp")),
        ("--use-torch-fsdp2 --use-distributed-optimizer", ("--use-distributed-optimizer", "--zero-stage 1, not 3")),
    ],
)
def test_fsdp_that_contradicts_itself(flags: str, words: tuple[str, ...]):
    refused(flags, *words)


def test_a_sharding_strategy_without_fsdp_is_noted():
    config = build("--data-parallel-sharding-strategy optim_grads")
    assert config.parallel.zero_stage == 0 and any(
        "has no effect without --use-megatron-fsdp" in n for n in config.notes
    )
    config = build("--torch-fsdp2-no-reshard-after-forward")
    assert config.parallel.zero_stage == 0 and any("has no effect without --use-torch-fsdp2" in n for n in config.notes)


# ---- other names for one setting, and for several


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--encoder-num-layers 8 --encoder-seq-length 192 --batch-size 1", ""),
        (
            "--model-parallel-size 2 --pipe-parallel-size 2",
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        ),
        ("--warmup 0.1", "--lr-warmup-fraction 0.1"),
        ("--no-pipeline-parallel --ds-sequence-parallel-size 4", "--ulysses-parallel-size 4"),
        ("--num-key-value-heads 4", "--group-query-attention --num-query-groups 4"),
        ("--num-key-value-heads 12", "--group-query-attention --num-query-groups 12"),
        ("--attention-head-type multiquery", "--group-query-attention"),
        ("--attention-head-type multihead", ""),
        ("--glu-activation swiglu", "--swiglu --ffn-hidden-size 384"),
        ("--glu-activation swiglu --ffn-hidden-size 100", "--swiglu --ffn-hidden-size 100"),
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm", "--qk-layernorm"),
        ("--rotary-position-embeddings-theta 500000", "--rotary-base 500000"),
        ("--dataloader-inter-document-masking", "--reset-attention-mask --reset-position-ids"),
        (
            "--hybrid-layer-pattern M-M*|M-M- --pipeline-model-parallel-size 2 --mamba-num-groups 1 --num-layers 3",
            "--is-hybrid-model --hybrid-override-pattern M-M*M-M- --pipeline-model-parallel-size 2 "
            "--mamba-num-groups 1",
        ),
        (
            "--use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16 --bf16",
            "--zero-stage 0 --grad-reduce-in-bf16 --bf16",
        ),
        (
            "--use-megatron-fsdp --megatron-fsdp-grad-comm-dtype bf16 --megatron-fsdp-main-grads-dtype fp32 --bf16",
            "--zero-stage 0 --grad-reduce-in-bf16 --bf16",
        ),
        ("--normalization rmsnorm", "--normalization RMSNorm"),
        ("--normalization layernorm", ""),
        (
            "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path a",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model a",
        ),
        ("--save a --persistent-save-interval 5", "--save a --save-interval 5"),
        ("--gas 3", "--global-batch-size 60 --gradient-accumulation-steps 3"),
        ("--context-parallel-size 4 --context-parallel-algo ulysses_cp_algo", "--ulysses-parallel-size 4"),
        ("--context-parallel-size 4 --context-parallel-algo megatron_cp_algo", "--ring-parallel-size 4"),
        (
            "--context-parallel-size 4 --context-parallel-algo kvallgather_cp_algo",
            "--context-parallel-size 4 --cp-comm-type all_gather",
        ),
        (
            "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2",
            "--ulysses-parallel-size 2 --ring-parallel-size 2",
        ),
        (
            "--rope-scaling-type llama3 --rope-scaling-factor 8 --low-freq-factor 1.0 --high-freq-factor 4.0 "
            "--original-max-position-embeddings 8192 --position-embedding-type rope",
            "--use-rope-scaling --position-embedding-type rope",
        ),
        ("--rank 1 --world-size 20 --local-rank 1 --dist-url tcp://a:1", "--world-size 20"),
        ("--optimizer fusedadamw", "--optimizer adam"),
        ("--no-cuda", "--device cpu"),
        ("--eval-only true", "--skip-train"),
        ("--no-train 1", "--skip-train"),
        ("--bf16 --o2-gradient", "--bf16 --grad-reduce-in-bf16"),
        ("--RMSNorm", "--normalization RMSNorm"),
        ("--npu-deterministic", "--deterministic-mode"),
        ("--optimizer-selection fused_torch_adamw", "--optimizer adam"),
        (
            "--overlapped-distributed-optimizer",
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        ),
        ("--context-parallel-size 4 --context-parallel-algo adaptive_cp_algo", "--ring-parallel-size 4"),
        (
            "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16",
            "--bf16 --use-distributed-optimizer --grad-reduce-in-bf16",
        ),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp32", ""),
        (
            "--pipeline-model-parallel-size 5 --pp-partition-method type:transformer|embedding",
            "--pipeline-model-parallel-size 5 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
        ),
        (
            "--pipeline-model-parallel-size 4 --pp-partition-method type:transformer|embedding",
            "--pipeline-model-parallel-size 4",
        ),
        ("--enable-zbh1-pipeline --pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
        ("--reset-progress --load a", "--reset-iteration --load a"),
        ("--save a --save-interval 0", "--save a"),
        ("--eval-iters -1", "--eval-iters 0"),
        (
            "--tokenizer-type AutoTokenizer --tokenizer-model a",
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model a",
        ),
        ("--log-progress", ""),
        (f"{FULL} uniform", f"{FULL} uniform --recompute-num-layers 1"),
        ("--save-interval 5", ""),
        ("--ckpt-format torch --save a", "--save a"),
        ("--use-mpi", "--deepspeed_mpi"),
        ("--wandb-project a --wandb-name b", "--wandb-project a --wandb-exp-name b"),
        ("--padded-vocab-size 512", "--pad-vocab-size-to 512"),
        ("--enable-hf2mg-convert --model-type-hf qwen3 --load a", "--load a --exit-on-missing-checkpoint"),
    ],
)
def test_names(theirs: str, ours: str):
    same(theirs, ours, world_size=20)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--batch-size 2", ("--micro-batch-size and --batch-size", "differ")),
        ("--num-key-value-heads 4 --num-query-groups 2", ("--num-key-value-heads 4", "--num-query-groups 2")),
        ("--attention-head-type multihead --group-query-attention", ("multihead", "--group-query-attention")),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2", ("--no-pipeline-parallel", "size 2")),
        (
            "--context-parallel-algo ulysses_cp_algo --cp-comm-type p2p --context-parallel-size 4",
            ("--context-parallel-algo ulysses_cp_algo", "p2p"),
        ),
        ("--rope-scaling-type llama3 --low-freq-factor 2", ("--low-freq-factor 2", "use 1")),
        ("--high-freq-factor 4", ("--high-freq-factor", "--rope-scaling-type llama3")),
        ("--rope-scaling-type yarn", ("--rope-scaling-type yarn", "llama3")),
        ("--gas 3 --global-batch-size 4", ("--gradient-accumulation-steps 3", "--global-batch-size 4", "use 3")),
        ("--spec my.module my_spec", ("--spec my.module my_spec", "leave it out")),
        ("--hybrid-layer-pattern M*/M", ("has layers that predict later tokens (/)", "leave them out")),
        ("--hybrid-layer-pattern M*|M", ("stages (|) of unequal lengths", "make them equal")),
        ("--hybrid-layer-pattern M*|M*", ("has 2 stages (|)", "use --pipeline-model-parallel-size 2")),
        ("--hybrid-layer-pattern MD", ("--hybrid-override-pattern MD", "has 'D'")),
        ("--glu-activation geglu", ("--glu-activation geglu", "swiglu")),
        ("--rank 0", ("--rank 0", "--world-size")),
        ("--no-cuda --device cuda", ("--no-cuda", "--device cuda")),
        ("--eval-only false", ("--eval-only false", "leave it out")),
        ("--main-grads-dtype bf16", ("--main-grads-dtype bf16", "--grad-reduce-in-bf16")),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", ("--exp-avg-dtype", "fp32")),
        ("--reset-iteration", ("--reset-iteration", "--load")),
        ("--gas 0", ("--gradient-accumulation-steps 0",)),
    ],
)
def test_names_that_contradict(flags: str, words: tuple[str, ...]):
    refused(flags, *words, world_size=4 if "context-parallel" in flags else 1)


def test_ignored_formats_are_noted():
    assert any("--use-precision-aware-optimizer: the optimizer's state is in fp32" in note for note in
               build("--use-precision-aware-optimizer").notes)  # fmt: skip
    pipeline = build("--pipeline-model-parallel-size 2 --pp-partition-method parameters", 2)
    assert any("--pp-partition-method parameters: stages hold equal numbers" in note for note in pipeline.notes)
    assert any("nothing is saved" in note for note in build("--save-interval 5").notes)
    assert any(
        "--ckpt-format torch: checkpoints are written as torch_dist" in n for n in build("--ckpt-format torch").notes
    )


def test_rows_of_the_embedding():
    from megatron.training.data.tokenizer import padded_vocab_size

    assert padded_vocab_size(301, 128, 2, None) == 512 and padded_vocab_size(301, 128, 2, 302) == 302
    for rows, vocabulary, tensor in ((300, 301, 1), (303, 301, 2)):
        with pytest.raises(Refusal, match=f"--padded-vocab-size {rows}"):
            padded_vocab_size(vocabulary, 128, tensor, rows)


# ---- DeepSpeed


TEMPLATE = {  # as in Megatron-DeepSpeed's examples
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 10,
    "zero_optimization": {"stage": 1, "overlap_comm": True},
    "gradient_clipping": 0.5,
    "prescale_gradients": False,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 2,
        "initial_scale_power": 11,
    },
    "wall_clock_breakdown": False,
}


GROWING = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 64,
    "max_difficulty": 192,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 953, "difficulty_step": 8},
}


def with_file(folder: Path, content: object, flags: str = "", world_size: int = 1) -> Config:
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return build(f"--deepspeed --deepspeed_config {path} {flags}", world_size)


def test_a_deepspeed_file(tmp_path: Path):
    ours = (
        "--global-batch-size 8 --zero-stage 1 --clip-grad 0.5 --fp16 --loss-scale-window 500 --hysteresis 3 "
        "--min-loss-scale 2 --initial-loss-scale 2048"
    )
    config, expected = with_file(tmp_path, TEMPLATE), build(ours)
    assert any("steps_per_print, zero_optimization.overlap_comm, prescale_gradients" in n for n in config.notes)
    config.notes = expected.notes = []
    assert config == expected
    agreeing = with_file(tmp_path, TEMPLATE, f"{ours} --deepspeed_mpi")
    agreeing.notes = []
    assert agreeing == expected


@pytest.mark.parametrize(
    ("content", "ours"),
    [
        ({"gradient_clipping": 1.0}, ""),
        ({}, "--clip-grad 0"),  # DeepSpeed's default
        ({"gradient_clipping": 0}, "--clip-grad 0"),
        ({"gradient_clipping": "auto"}, "--clip-grad 0"),
        ({"gradient_clipping": 1, "bf16": {"enabled": True}}, "--bf16"),
        ({"gradient_clipping": 1, "bfloat16": {"enabled": True}, "fp16": {"enabled": False}}, "--bf16"),
        ({"gradient_clipping": 1, "fp16": {"enabled": True}}, "--fp16 --initial-loss-scale 65536"),
        (
            {"gradient_clipping": 1, "fp16": {"enabled": True, "loss_scale": 128}},
            "--fp16 --loss-scale 128 --initial-loss-scale 65536",
        ),
        ({"gradient_clipping": 1, "zero_optimization": True}, "--zero-stage 1"),
        (
            {"gradient_clipping": 1, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}}},
            "--zero-stage 3",
        ),
        ({"gradient_clipping": 1, "zero_optimization": {"overlap_comm": True}}, "--zero-stage 0"),
        ({"gradient_clipping": 1, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3}, "--gas 3"),
        (
            {"gradient_clipping": 1, "train_batch_size": 3, "gradient_accumulation_steps": 3},
            "--global-batch-size 3 --gas 3",
        ),
        (
            {"gradient_clipping": 1, "bf16": {"enabled": True}, "communication_data_type": "bfp16"},
            "--bf16 --grad-reduce-in-bf16",
        ),
        (
            {"gradient_clipping": 1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            "--bf16",
        ),
        ({"gradient_clipping": 1, "compression_training": {"layer_reduction": {"enabled": False}}}, ""),
        ({"gradient_clipping": 1, "curriculum_learning": GROWING}, "--rampup-seq-length 64 8 953"),
        ({"gradient_clipping": 1, "curriculum_learning": {"enabled": False}, "optimizer": {"type": "Adam"}}, ""),
    ],
)
def test_keys_of_a_deepspeed_file(tmp_path: Path, content: dict, ours: str):
    config, expected = with_file(tmp_path, content), build(ours)
    config.notes = expected.notes = []
    assert config == expected


@pytest.mark.parametrize(
    ("content", "flags", "words"),
    [
        (TEMPLATE, "--global-batch-size 4", ("train_batch_size 8", "--global-batch-size 4")),
        (TEMPLATE, "--clip-grad 1", ("gradient_clipping 0.5", "--clip-grad 1")),
        (TEMPLATE, "--zero-stage 2", ("zero_optimization.stage 1", "--zero-stage 2")),
        (TEMPLATE, "--bf16", ("fp16.enabled", "--bf16")),
        (TEMPLATE, "--clip-grad 1 --zero-stage 2", ("--clip-grad 1", "--zero-stage 2")),  # both in one line
        ({"bf16": {"enabled": False}}, "--bf16", ("bf16.enabled false", "--bf16")),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, "--loss-scale 16", ("fp16.loss_scale 8", "--loss-scale 16")),
        ({"train_batch_size": 4, "gradient_accumulation_steps": 3}, "", ("--global-batch-size 4", "use 3")),
        ({"train_batch_size": "8"}, "", ('train_batch_size "8"', "not an integer")),
        ({"train_batch_size": 1.5}, "", ("train_batch_size 1.5", "not an integer")),
        ('{"gradient_clipping": NaN}', "", ("gradient_clipping NaN", "number")),
        ({"fp16": {"enabled": True, "initial_scale_power": "x"}}, "", ("fp16.initial_scale_power",)),
        ({"fp16": True}, "", ("fp16", "JSON object")),
        ({"zero_optimization": {"stage": 4}}, "", ("zero_optimization.stage 4",)),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "",
            ("zero_optimization.offload_optimizer", "--zero-stage"),
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "", ("zero_optimization.cpu_offload",)),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "",
            ("zero_optimization.zero_quantized_gradients",),
        ),
        ({"zero_optimization": {"stag": 2}}, "", ("zero_optimization.stag", "not a known key")),
        ({"scheduler": {"type": "WarmupLR"}}, "", ("scheduler", "--lr-decay-style")),
        (
            {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
            "",
            ("compression_training", "leave it out"),
        ),
        ({"curriculum_learning": {"enabled": True}}, "", ("curriculum_learning", "leave it out")),
        ({"curriculum_learning": {**GROWING, "max_difficulty": 64}}, "", ("max_difficulty 64", "--seq-length 192")),
        ({"curriculum_learning": {**GROWING, "min_difficulty": 1.5}}, "", ("curriculum_learning", "integers")),
        ({"curriculum_learning": {**GROWING, "min_difficulty": 4}}, "", ("--rampup-seq-length 4 8 953", "start")),
        (
            {"curriculum_learning": GROWING},
            "--rampup-seq-length 8 8 9",
            ("curriculum_learning", "--rampup-seq-length [8, 8, 9]"),
        ),
        ({"curriculum_learning": GROWING}, "--attention-mask full", ("--rampup-seq-length", "mask")),
        ({"communication_data_type": "fp16"}, "", ("communication_data_type",)),
        ({"grad_clipping": 1.0}, "", ("grad_clipping", "did you mean gradient_clipping?")),
        ({"fp16": {"enabled": True, "hysteresi": 1}}, "", ("fp16.hysteresi", "fp16.hysteresis")),
        ("[1]", "", ("is not a JSON object",)),
        ('{"train_batch_size": GBSIZE}', "", ("is not JSON (line 1)", "placeholders")),
    ],
)
def test_refusals_of_a_deepspeed_file(tmp_path: Path, content: object, flags: str, words: tuple[str, ...]):
    with pytest.raises(Refusal) as caught:
        with_file(tmp_path, content, flags)
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), caught.value


def test_deepspeeds_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused(f"--deepspeed --deepspeed_config {tmp_path}/none.json", "--deepspeed_config", "no such file")
    refused("--deepspeed_config a.json", "--deepspeed_config", "--deepspeed")
    assert any("only the flags are read" in note for note in build("--deepspeed").notes)
    config = with_file(tmp_path, {}, "--clip-grad 2")
    assert config.optimizer.clip_grad == 2 and any("DeepSpeed would not clip" in note for note in config.notes)
    config = with_file(tmp_path, TEMPLATE, "--loss-scale 12")
    assert config.optimizer.loss_scale is None and any("--loss-scale 12 is ignored" in note for note in config.notes)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    refused("--deepspeed --deepspeed_mpi", "--deepspeed_mpi", "torchrun")
