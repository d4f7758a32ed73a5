# SPDX-License-Identifier: Apache-2.0
"""Values that `complete` derives, and its refusals: one line that names the options and the fix."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.context_parallel.layout.grid import abstract_grid
from megatron.context_parallel.layout.sequence_layout import SequenceLayout
from megatron.training.arguments import validate
from megatron.training.arguments.parser import parse
from megatron.training.arguments.stages import stage_layers
from megatron.training.arguments.validate import complete, data_parallel_size
from megatron.training.arguments.validate.check_memory import attention_chunks, loss_chunks
from megatron.training.refusal import Refusal
from megatron.training.settings.config import Config
from tests.properties import examples

SMALL = (
    "--num-layers 8 --hidden-size 96 --num-attention-heads 12 --seq-length 192 --max-position-embeddings 192 "
    "--micro-batch-size 1 --attention-dropout 0 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 99"
)

YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor"


def build(flags: str, world_size: int = 1, without: str = "") -> Config:
    words = SMALL.split()
    for flag in without.split():
        at = words.index(flag)
        del words[at : at + (1 if flag == "--mock-data" else 2)]
    return parse([*words, *flags.split()], world_size=world_size)


def test_refusal_is_where_other_modules_look_for_it():
    assert validate.Refusal is Refusal and issubclass(Refusal, ValueError)


@pytest.fixture(autouse=True)
def no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the same settings on every machine, with or without Transformer Engine."""
    monkeypatch.setattr(validate, "transformer_engine_installed", lambda: False)


# ---- derived values


@pytest.mark.parametrize(
    "flags, world, chunks, ffn, loss",
    [
        ("", 1, 1, None, None),
        ("--fpdt --fpdt-chunk-size 192", 1, 1, 2, 4),
        ("--fpdt --fpdt-chunk-size 100", 1, 2, 4, 4),
        ("--fpdt --fpdt-chunk-size 40 --ffn-chunks 3 --loss-chunks 7", 1, 5, 3, 7),
        ("--fpdt --fpdt-chunk-size 40 --ulysses-parallel-size 2 --ring-parallel-size 2", 4, 5, 10, 4),
        ("--fpdt --fpdt-chunk-size 40 --tensor-model-parallel-size 2 --sequence-parallel", 2, 5, 10, 4),
        ("--ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-chunk-size 64", 1, 3, 6, 4),
    ],
)
def test_numbers_of_chunks(flags, world, chunks, ffn, loss):
    config = build(flags, world)
    assert attention_chunks(config) == chunks and config.chunks.ffn_chunks == ffn
    assert loss_chunks(config, vocab_size=150) == loss  # 2 * 150 / 96, rounded up


def test_a_loss_chunk_does_not_grow_with_the_sequence():
    for length in (262144, 1048576):
        flags = f"--fpdt --fpdt-chunk-size 8192 --max-position-embeddings {length} --position-embedding-type rope"
        config = build(f"{flags} --seq-length {length}", without="--seq-length --max-position-embeddings")
        assert length / loss_chunks(config, vocab_size=32000) == 256


def test_shape_defaults():
    model = build("").model
    assert (model.kv_channels, model.ffn_hidden_size, model.num_query_groups) == (8, 384, 12)
    assert build("--swiglu").model.ffn_hidden_size == 256
    assert build("--group-query-attention --num-query-groups 4").model.num_query_groups == 4
    assert build("--group-query-attention").model.num_query_groups == 1
    assert build("--kv-channels 7 --hidden-size 100").model.kv_channels == 7


def test_only_learned_positions_need_a_maximum_length():
    build_with = "--position-embedding-type rope"
    assert build(build_with, without="--max-position-embeddings").model.max_position_embeddings == 192
    with pytest.raises(Refusal, match="missing: --max-position-embeddings"):
        build("", without="--max-position-embeddings")


def test_complete_leaves_its_argument_alone():
    config = parse(SMALL.split())
    assert complete(config, 1).model.kv_channels == 8
    assert config.model.kv_channels is None and config.notes == []


@pytest.mark.parametrize(
    ("flags", "grid"),
    [
        ("", (1, 1)),
        ("--ulysses-parallel-size 4", (4, 1)),
        ("--ring-parallel-size 4", (1, 4)),
        ("--ulysses-parallel-size 2 --ring-parallel-size 4", (2, 4)),
        ("--context-parallel-size 8 --ulysses-parallel-size 2", (2, 4)),
        ("--context-parallel-size 8 --ring-parallel-size 8", (1, 8)),
        ("--context-parallel-size 8 --ring-parallel-size 4 --ulysses-parallel-size 2", (2, 4)),
        ("--hierarchical-context-parallel-sizes 2 4 --context-parallel-size 8", (2, 4)),
        ("--hierarchical-context-parallel-sizes 2 4", (2, 4)),
        ("--context-parallel-size 1 --ulysses-parallel-size 2 --ring-parallel-size 4", (2, 4)),
        ("--context-parallel-size 1 --hierarchical-context-parallel-sizes 2 4", (2, 4)),
        ("--context-parallel-size 8 --cp-comm-type p2p", (1, 8)),
        ("--context-parallel-size 4 --cp-comm-type a2a", (4, 1)),
        ("--context-parallel-size 8 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4", (2, 4)),
        ("--context-parallel-size 8 --cp-comm-type all_gather", (1, 8)),
        ("--context-parallel-size 8 --cp-comm-type all_gather --ulysses-parallel-size 2", (2, 4)),
        ("--ring-parallel-size 4 --cp-comm-type all_gather", (1, 4)),
        ("--context-parallel-size 1 --cp-comm-type p2p --ulysses-parallel-size 2 --ring-parallel-size 4", (2, 4)),
        ("--cp-comm-type p2p p2p p2p", (1, 1)),
        # only a context-parallel size: the largest Ulysses degree that neither splits nor copies a head
        ("--context-parallel-size 4", (4, 1)),
        ("--context-parallel-size 8", (4, 2)),
        ("--context-parallel-size 4 --tensor-model-parallel-size 2", (2, 2)),
        ("--context-parallel-size 4 --group-query-attention --num-query-groups 2", (2, 2)),
        ("--context-parallel-size 8 --group-query-attention --num-query-groups 6", (2, 4)),
        ("--context-parallel-size 4 --group-query-attention", (1, 4)),
        (
            "--context-parallel-size 2 --tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
            (1, 2),
        ),
    ],
)
def test_ulysses_and_ring(flags: str, grid: tuple[int, int]):
    config = build(flags, world_size=8)
    parallel = config.parallel
    assert (parallel.ulysses_parallel_size, parallel.ring_parallel_size) == grid
    assert parallel.context_parallel_size == prod(grid)
    others = ("ring-", "ulysses-", "hier", "cp-comm")
    chosen = "--context-parallel-size" in flags and not any(word in flags for word in others)
    assert any("is split into" in note for note in config.notes) == chosen
    assert data_parallel_size(config, 8) == 8 // prod(grid) // parallel.tensor_model_parallel_size


def test_sequence_parallel_without_tensor_parallel_is_switched_off():
    config = build("--sequence-parallel")
    assert not config.parallel.sequence_parallel and any("--sequence-parallel" in note for note in config.notes)
    config = build("--sequence-parallel --tensor-model-parallel-size 2", 2)
    assert config.parallel.sequence_parallel and not any("--sequence-parallel" in note for note in config.notes)


@pytest.mark.parametrize(
    "flags", ["--num-virtual-stages-per-pipeline-rank 2", "--num-layers-per-virtual-pipeline-stage 2"]
)
def test_virtual_stages_in_both_spellings(flags: str):
    config = build(f"{flags} --pipeline-model-parallel-size 2", 2)
    assert config.parallel.num_virtual_stages_per_pipeline_rank == 2
    assert config.parallel.num_layers_per_virtual_pipeline_stage == 2
    assert config.data.global_batch_size == 2  # as many micro-batches as stages


def test_one_virtual_stage_is_none():
    parallel = build("--num-layers-per-virtual-pipeline-stage 4 --pipeline-model-parallel-size 2", 2).parallel
    assert parallel.num_virtual_stages_per_pipeline_rank is None
    assert parallel.num_layers_per_virtual_pipeline_stage is None


@pytest.mark.parametrize(
    ("flags", "stage"),
    [
        ("", 0),
        ("--zero-stage 0", 0),
        ("--zero-stage 1", 1),
        ("--use-distributed-optimizer", 1),
        ("--zero-stage 2", 2),
        ("--zero-stage 3 --optimizer sgd", 3),
    ],
)
def test_zero(flags: str, stage: int):
    parallel = build(flags).parallel
    assert parallel.zero_stage == stage and parallel.use_distributed_optimizer == (stage == 1)


def test_fsdp_overlaps_by_itself():
    config = build("--zero-stage 3 --overlap-grad-reduce --overlap-param-gather")
    assert not config.parallel.overlap_grad_reduce and not config.parallel.overlap_param_gather
    assert any("--overlap-grad-reduce, --overlap-param-gather: no effect" in note for note in config.notes)


def test_recompute_activations_is_selective():
    assert build("--recompute-activations").attention.recompute_granularity == "selective"


def test_batch_and_schedule_defaults():
    config = build("--micro-batch-size 3", 4)
    assert config.data.global_batch_size == 12 and config.optimizer.lr_decay_iters == 20
    config = build("--train-samples 100 --global-batch-size 8", without="--train-iters")
    assert config.optimizer.lr_decay_samples == 100 and config.optimizer.lr_decay_iters is None


def test_evaluation_alone_needs_no_schedule():
    assert build("--skip-train", without="--train-iters --lr").optimizer.lr is None


def test_named_gpt_has_as_many_positions_as_the_sequence():
    flags = "--model gpt-2.7b --seq-length 65536 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data"
    model = parse(flags.split(), world_size=1).model
    assert model.max_position_embeddings == 65536 and model.vocab_size == 50256  # without the end-of-document token


def test_rope_may_go_beyond_the_length_it_was_made_for():
    config = build("--seq-length 384 --position-embedding-type rope")
    assert any("--max-position-embeddings 192" in note for note in config.notes)


def test_tokenizer_defaults():
    assert build("--vocab-file a --merge-file b").data.tokenizer_type == "GPT2BPETokenizer"
    assert build("--vocab-size 100").data.tokenizer_type == "NullTokenizer"
    with pytest.raises(Refusal, match="--tokenizer-type is missing"):
        build("", without="--vocab-size")
    assert build("--tokenizer-type ByteLevelTokenizer", without="--vocab-size").model.vocab_size is None


def test_full_mask_goes_with_zigzag():
    assert build("--attention-mask full --ring-parallel-size 2", 2).parallel.context_parallel_balance == "zigzag"


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 4 --disable-bias-linear",
        "--multi-latent-attention --position-embedding-type rope",
        "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --normalization RMSNorm",
        "--mtp-num-layers 1 --position-embedding-type rope --hidden-dropout 0",
        "--reordered-norm",
    ],
)
def test_layers_that_transformer_engine_does_not_have_are_cores_own(flags: str) -> None:
    """Published scripts name Transformer Engine, which is Megatron-LM's default."""
    config = build(f"{flags} --transformer-impl transformer_engine")
    assert config.model.transformer_impl == "local"
    assert [note for note in config.notes if flags.split()[0] in note and "core's own" in note]


def test_transformer_engine_is_used_for_fp8(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(validate, "transformer_engine_installed", lambda: True)
    assert build("--fp8-format hybrid").model.transformer_impl == "transformer_engine"
    assert build("").model.transformer_impl == "auto"
    with pytest.raises(Refusal, match="--zero-stage 3 with --fp8-format is not supported: .* --zero-stage 1"):
        build("--fp8-format hybrid --zero-stage 3")


# ---- refusals: flags, processes, words of the line

BEST = "--save a --save-interval 6 --keep-best-checkpoints 1"
COPIES = "--non-persistent-save-interval 2 --non-persistent-ckpt-type local"
REFUSALS = [
    # the grid
    ("--tensor-model-parallel-size 4 --ring-parallel-size 2", 4, "= 8 ranks larger 4 processes"),
    ("--ulysses-parallel-size 3", 4, "--ulysses-parallel-size 3 ranks does not divide 4 processes"),
    ("--pipeline-model-parallel-size 2", 1, "--pipeline-model-parallel-size 2 larger"),
    ("--context-parallel-size 6 --ulysses-parallel-size 4", 12, "--context-parallel-size 6 --ulysses-parallel-size 4"),
    ("--context-parallel-size 8 --ulysses-parallel-size 2 --ring-parallel-size 2", 8,
     "8 is not --ulysses-parallel-size 2"),
    ("--hierarchical-context-parallel-sizes 2 2 --context-parallel-size 8", 8, "--context-parallel-size 8 is not"),
    ("--context-parallel-size 8 --cp-comm-type p2p --ulysses-parallel-size 4", 8, "--ulysses-parallel-size 1, not 4"),
    ("--context-parallel-size 8 --cp-comm-type a2a --ring-parallel-size 2", 8, "a2a --ring-parallel-size 1, not 2"),
    ("--context-parallel-size 8 --cp-comm-type a2a+p2p", 8, "--cp-comm-type a2a+p2p --hierarchical-context"),
    ("--context-parallel-size 8 --cp-comm-type all_gather --fpdt --fpdt-chunk-size 1024", 8,
     "--cp-comm-type all_gather --fpdt --cp-comm-type p2p"),
    ("--context-parallel-size 8 --cp-comm-type p2p a2a", 8, "--cp-comm-type p2p a2a give one type"),
    ("--context-parallel-size 8 --cp-comm-type nvlink", 8, "--cp-comm-type nvlink unknown p2p"),
    ("--hierarchical-context-parallel-sizes 2 2 2", 8, "--hierarchical-context-parallel-sizes two sizes"),
    ("--hierarchical-context-parallel-sizes 2 2 --ring-parallel-size 4", 8,
     "--hierarchical-context-parallel-sizes agree"),
    ("--ulysses-parallel-size 0", 1, "--ulysses-parallel-size 0 at least 1"),
    # heads
    ("--tensor-model-parallel-size 8", 8, "--num-attention-heads 12 --tensor-model-parallel-size 8 use size 4"),
    ("--ulysses-parallel-size 8", 8, "--ulysses-parallel-size 8 12 query heads use --ulysses-parallel-size 4 size 2"),
    ("--tensor-model-parallel-size 2 --ulysses-parallel-size 4", 8, "6 query heads TP 2 use --ulysses-parallel-size 2"),
    ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 6", 4,
     "--num-query-groups 6 --tensor-model-parallel-size 4 use 2"),
    ("--group-query-attention --num-query-groups 5", 1, "--num-attention-heads 12 --num-query-groups 5"),
    ("--num-query-groups 4", 1, "--num-query-groups 4 --group-query-attention add"),
    ("--num-attention-heads 10", 1, "--hidden-size 96 --num-attention-heads 10 90 or 100 --kv-channels"),
    ("--ffn-hidden-size 101 --tensor-model-parallel-size 2", 2, "--ffn-hidden-size 101 --tensor 100 or 102"),
    ("--position-embedding-type rope --kv-channels 7", 1, "RoPE --rotary-percent --kv-channels"),
    (f"{YARN} 4 --rotary-percent 0.4", 1, "RoPE --rotary-percent 0.4 --kv-channels"),
    ("--position-embedding-type yarn", 1, "yarn --yarn-rotary-scaling-factor 1 nothing --position-embedding-type rope"),
    ("--position-embedding-type rope --yarn-mscale 0.7 --no-yarn-correction-range-round-to-int", 1,
     "--yarn-mscale --no-yarn-correction-range-round-to-int --position-embedding-type yarn add"),
    (f"{YARN} 4 --use-rope-scaling", 1, "--use-rope-scaling --position-embedding-type yarn leave one out"),
    (f"{YARN} 4 --rotary-seq-len-interpolation-factor 2", 1,
     "--rotary-seq-len-interpolation-factor --position-embedding-type yarn leave one out"),
    (f"{YARN} 4 --yarn-beta-fast 1", 1, "--yarn-beta-fast 1 above --yarn-beta-slow 1"),
    (f"{YARN} 4 --rotary-base 1", 1, "--rotary-base 1 2 or more"),
    (f"{YARN} 4 --yarn-original-max-position-embeddings 0", 1, "--yarn-original-max-position-embeddings 0 at least 1"),
    # the sequence
    ("--ring-parallel-size 2 --seq-length 194", 2, "--seq-length 194 zigzag multiple of 4 192 or 196"),
    ("--ring-parallel-size 4 --context-parallel-balance contiguous --seq-length 190", 4,
     "--seq-length contiguous 188 or 192"),
    ("--ulysses-parallel-size 3 --ring-parallel-size 2 --seq-length 190", 6, "--seq-length 190 Ulysses 3 Ring 2 of 12"),
    ("--ring-parallel-size 2 --tensor-model-parallel-size 4 --sequence-parallel --seq-length 188", 8,
     "--seq-length 188 TP 4 sequence-parallel multiple of 8, 184 or 192"),
    ("--seq-length 193", 1, "--max-position-embeddings 192 --seq-length 193 --position-embedding-type rope"),
    # the pipeline
    ("--pipeline-model-parallel-size 3", 3, "--num-layers 8 --pipeline-model-parallel-size 3 6 or 9"),
    ("--num-virtual-stages-per-pipeline-rank 2", 1, "--pipeline-model-parallel-size above 1"),
    ("--num-virtual-stages-per-pipeline-rank 3 --pipeline-model-parallel-size 2", 2, "--num-virtual 3 4 layers"),
    ("--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2", 2,
     "--num-layers-per-virtual 3 4 layers"),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--num-virtual-stages-per-pipeline-rank 4",
        2,
        "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank one",
    ),
    ("--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-size 2 --global-batch-size 3", 2,
     "--global-batch-size 3 micro-batches --pipeline-model-parallel-size 2 multiple of 2"),
    # precision and memory
    ("--bf16 --fp16", 1, "--bf16 --fp16"),
    ("--fp8-format hybrid", 1, "--fp8-format hybrid Transformer Engine"),
    ("--fp8-format hybrid --transformer-impl local", 1, "--fp8-format hybrid --transformer-impl transformer_engine"),
    ("--transformer-impl transformer_engine", 1, "--transformer-impl transformer_engine installed local"),
    ("--grad-reduce-in-bf16", 1, "--grad-reduce-in-bf16 --bf16"),
    ("--swiglu --squared-relu", 1, "--swiglu --squared-relu"),
    ("--swiglu --openai-gelu", 1, "--swiglu --openai-gelu"),
    ("--zero-stage 3 --pipeline-model-parallel-size 2", 2,
     "--zero-stage 3 --pipeline-model-parallel-size 2 --zero-stage 1 --pipeline-model-parallel-size 1"),
    ("--zero-stage 3 --use-distributed-optimizer", 1, "--use-distributed-optimizer --zero-stage 1 not 3"),
    ("--zero-stage 0 --use-distributed-optimizer", 1, "--use-distributed-optimizer --zero-stage 1"),
    ("--zero-stage 1 --optimizer sgd", 1, "--optimizer sgd --zero-stage 0"),
    ("--overlap-param-gather --overlap-grad-reduce", 1, "--overlap-param-gather --zero-stage 1"),
    ("--overlap-param-gather --zero-stage 1", 1, "--overlap-param-gather --overlap-grad-reduce"),
    ("--recompute-granularity full", 1, "--recompute-method uniform --recompute-num-layers 1"),
    ("--recompute-granularity full --recompute-method block --recompute-num-layers 9", 1,
     "--recompute-num-layers 9 most 8"),
    ("--recompute-granularity selective --recompute-method uniform", 1,
     "--recompute-method --recompute-granularity full"),
    ("--recompute-activations --recompute-granularity full", 1, "--recompute-activations --recompute-granularity"),
    # chunks and host memory
    ("--fpdt", 1, "--fpdt-chunk-size 65536 --seq-length 192 at most 192"),
    ("--fpdt --fpdt-chunk-size 193", 1, "--fpdt-chunk-size 193 --seq-length 192 at most 192"),
    (
        "--fpdt --fpdt-chunk-size 7 --ulysses-parallel-size 2 --ring-parallel-size 2 --tensor-model-parallel-size 2 "
        "--sequence-parallel",
        8,
        "--fpdt-chunk-size 7 Ulysses 2 x Ring 2 x TP 2 at least 8",
    ),
    ("--fpdt-chunk-size 64", 1, "--fpdt-chunk-size without --fpdt: add"),
    ("--no-fpdt-offload", 1, "--no-fpdt-offload without --fpdt: add"),
    ("--fpdt-stream-hidden", 1, "--fpdt-stream-hidden without --fpdt: add"),
    ("--fpdt --fpdt-chunk-size 64 --fpdt-stream-hidden --no-fpdt-offload", 1, "--fpdt-stream-hidden --no-fpdt-offload"),
    ("--fpdt --fpdt-chunk-size 64 --fpdt-stream-hidden --pipeline-model-parallel-size 2", 2,
     "--fpdt-stream-hidden --pipeline-model-parallel-size 2 use --pipeline-model-parallel-size 1"),
    ("--fpdt --fpdt-chunk-size 64 --fpdt-stream-hidden --offload-checkpoints", 1,
     "--fpdt-stream-hidden leave --offload-checkpoints out"),
    ("--fpdt --fpdt-chunk-size 64 --recompute-activations", 1, "selective --fpdt leave it out"),
    ("--offload-checkpoints", 1, "--offload-checkpoints --recompute-granularity full --fpdt"),
    ("--profile --use-pytorch-profiler", 1, "--use-pytorch-profiler --tensorboard-dir"),
    ("--profile --profile-step-end 10", 1, "--profile-step-end 10 use 12"),
    ("--keep-attention", 1, "--keep-attention --recompute-granularity full"),
    ("--keep-attention --fpdt --fpdt-chunk-size 64 --recompute-granularity full --recompute-method uniform", 1,
     "--keep-attention --fpdt leave it out"),
    ("--keep-attention --recompute-granularity full --recompute-method uniform --recompute-num-layers 2", 1,
     "--keep-attention --recompute-num-layers 1"),
    ("--offload-checkpoints --recompute-granularity full --recompute-method block --recompute-num-layers 2", 1,
     "--offload-checkpoints --recompute-method block use --recompute-method uniform"),
    ("--ffn-chunks 0", 1, "--ffn-chunks 0 at least 1"),
    # batches and schedule
    ("--global-batch-size 6 --micro-batch-size 2", 2,
     "--global-batch-size 6 --micro-batch-size 2 x 2 multiple of 4, 4 or 8"),
    ("--global-batch-size 8 --rampup-batch-size 2 4 10", 1, "--rampup-batch-size 2 4 --global-batch-size 8"),
    ("--global-batch-size 8 --rampup-batch-size 8 4 10", 1, "--rampup-batch-size 8 4"),
    ("--train-samples 10", 1, "--train-iters --train-samples leave one out"),
    ("--lr 0", 1, "--lr 0 above 0"),
    ("--min-lr 1", 1, "--min-lr 1 --lr 0.001"),
    ("--lr-warmup-init 1", 1, "--lr-warmup-init 1 --lr 0.001"),
    ("--lr-warmup-iters 20", 1, "--lr-warmup-iters 20 --lr-decay-iters 20"),
    ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", 1, "--lr-warmup-fraction --lr-warmup-iters"),
    ("--lr-warmup-fraction 1", 1, "--lr-warmup-fraction 1"),
    ("--lr-decay-samples 5", 1, "--lr-decay-samples --train-iters use --lr-decay-iters"),
    ("--lr-warmup-samples 5", 1, "--lr-warmup-samples --train-iters use --lr-warmup-iters"),
    ("--lr-decay-style WSD", 1, "WSD --lr-wsd-decay-iters"),
    ("--decoupled-min-lr 1e-4", 1, "--decoupled-min-lr --decoupled-lr"),
    ("--start-weight-decay 0.1", 1, "--start-weight-decay --weight-decay-incr-style"),
    ("--weight-decay-incr-style linear --start-weight-decay 1 --end-weight-decay 0.1", 1, "--weight-decay-incr-style"),
    ("--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", 1,
     "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler"),
    ("--hidden-dropout 1", 1, "--hidden-dropout 1"),
    ("--attention-dropout 1", 1, "--attention-dropout 1"),
    ("--weight-decay -1", 1, "--weight-decay -1 negative"),
    ("--log-interval 0", 1, "--log-interval 0 at least 1"),
    ("--rotary-percent 1.5", 1, "--rotary-percent 1.5 at most 1"),
    # data and checkpoints
    ("--data-path a", 1, "--data-path --mock-data once"),
    ("--train-data-path a", 1, "--train-data-path --mock-data once"),
    ("--save a --save-retain-interval 5", 1, "--save-retain-interval --save-interval"),
    ("--save a --save-interval 2 --save-retain-interval 5", 1, "--save-retain-interval 5 multiple --save-interval 2"),
    ("--finetune", 1, "--finetune --load"),
    ("--ckpt-step 0", 1, "--ckpt-step --load"),
    ("--async-save", 1, "--async-save --save"),
    ("--keep-last-checkpoints 2", 1, "--keep-last-checkpoints --save"),
    ("--keep-last-checkpoints 0 --save a", 1, "--keep-last-checkpoints"),
    ("--save-interval 2 --save-retain-interval 4", 1, "--save-retain-interval --save"),
    ("--save-interval 2 --keep-best-checkpoints 1", 1, "--keep-best-checkpoints --save"),
    ("--save a --keep-best-checkpoints 1", 1, "--keep-best-checkpoints --save-interval"),
    (f"{BEST} --eval-iters 2", 1, "--keep-best-checkpoints --eval-interval"),
    (f"{BEST} --eval-iters 2 --eval-interval 4", 1, "--save-interval 6 multiple --eval-interval 4"),
    (f"{BEST} --eval-iters 0 --eval-interval 3", 1, "--keep-best-checkpoints --eval-iters 0"),
    ("--non-persistent-save-interval 2", 1, "add --non-persistent-ckpt-type local"),
    ("--non-persistent-save-interval 2 --non-persistent-ckpt-type global", 1, "global use local"),
    ("--non-persistent-save-interval 2 --non-persistent-ckpt-type in_memory", 1, "in_memory use local"),
    (f"{COPIES} --save a", 1, "--non-persistent-save-interval --save --load"),
    (f"{COPIES} --save a --load b", 1, "--non-persistent-save-interval --save --load same"),
    (f"{COPIES} --save a --load a --finetune", 1, "--non-persistent-save-interval --finetune leave"),
    (f"{COPIES} --save a --load a --no-load-optim", 1, "--non-persistent-save-interval --no-load-optim leave"),
    (f"{COPIES} --save a --load a --ckpt-step 3", 1, "--non-persistent-save-interval --ckpt-step leave"),
    (f"{COPIES} --save a --load a --replication --replication-factor 1", 2, "--replication-factor 1 use 2"),
    (f"{COPIES} --save a --load a --replication --replication-jump 0", 2, "--replication-jump 0 at least 1"),
    ("--skip-damaged-checkpoints", 1, "--skip-damaged-checkpoints --load"),
    ("--skip-damaged-checkpoints --load a --ckpt-step 2", 1, "--ckpt-step --skip-damaged-checkpoints"),
    ("--exit-on-missing-checkpoint", 1, "--exit-on-missing-checkpoint --load"),
    ("--manual-gc-interval 5", 1, "--manual-gc-interval --manual-gc"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "world_size", "words"), REFUSALS, ids=[case[0] for case in REFUSALS])
def test_refusals(flags: str, world_size: int, words: str):
    with pytest.raises(Refusal) as caught:
        build(flags, world_size)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words.split()), message


@pytest.mark.parametrize(
    ("without", "flags", "words"),
    [
        ("--train-iters", "", "--train-iters --train-samples"),
        ("--lr", "", "--lr"),
        ("--mock-data", "", "--data-path --mock-data"),
        ("--mock-data", "--data-path", "--data-path --mock-data"),
        ("--mock-data", "--data-path a --valid-data-path b", "--data-path --valid-data-path"),
        ("--mock-data", "--train-data-path a --split 9,1,0", "--split --train-data-path"),
        ("--train-iters", "--train-samples 2 --global-batch-size 4", "--train-samples 2 --global-batch-size"),
        ("--train-iters", "--train-samples 20 --lr-decay-iters 4", "--lr-decay-iters --train-samples"),
        ("--train-iters", "--train-samples 20 --lr-warmup-samples 20", "--lr-warmup-samples 20 --lr-decay-samples 20"),
    ],
)
def test_refusals_of_what_is_left_out(without: str, flags: str, words: str):
    with pytest.raises(Refusal) as caught:
        build(flags, without=without)
    assert all(word in str(caught.value) for word in words.split()), caught.value


def test_everything_missing_is_named_in_one_line():
    with pytest.raises(Refusal) as caught:
        complete(Config(), 1)
    for (
        name
    ) in "num-layers hidden-size num-attention-heads seq-length max-position-embeddings micro-batch-size".split():
        assert f"--{name}" in str(caught.value)


@examples(100)
@given(
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from(["zigzag", "contiguous"]),
    st.integers(1, 400),
    st.integers(1, 3),
)
def test_lengths_are_refused_exactly_where_the_layout_cannot_cut_them(
    ulysses: int, ring: int, balance: str, length: int, tensor: int
):
    """The larger length of a refusal is accepted, and the layout accepts the same lengths."""
    config = parse(SMALL.split())
    config.model.num_attention_heads, config.model.hidden_size = 360, 720
    config.model.max_position_embeddings, config.data.seq_length = 10**6, length
    config.parallel.ulysses_parallel_size, config.parallel.ring_parallel_size = ulysses, ring
    config.parallel.context_parallel_balance, config.parallel.tensor_model_parallel_size = balance, tensor
    config.parallel.sequence_parallel = True
    world_size = ulysses * ring * tensor
    try:
        done = complete(config, world_size)
    except Refusal as refusal:
        assert f"--seq-length {length} cannot" in str(refusal)
        config.data.seq_length = int(str(refusal).split()[-1])
        done = complete(config, world_size)
    grid = abstract_grid(ulysses=ulysses, ring=ring, tensor=tensor)
    assert SequenceLayout(done.data.seq_length, grid, balance).local_length % tensor == 0


@pytest.mark.parametrize(
    "flags, layers",
    [
        ("--num-layers 8", [2, 2, 2, 2]),
        ("--num-layers 9 --decoder-first-pipeline-num-layers 3", [3, 2, 2, 2]),
        ("--num-layers 7 --decoder-last-pipeline-num-layers 1", [2, 2, 2, 1]),
        ("--num-layers 7 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3", [2, 1, 1, 3]),
        ("--num-layers 7 --account-for-loss-in-pipeline-split", [2, 2, 2, 1]),
        ("--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [1, 2, 2, 1]),
        ("--num-layers 8 --pipeline-model-parallel-layout Et*3|t|(t)*4|L", [3, 1, 4, 0]),
        ("--num-layers 8 --pipeline-model-parallel-layout E|(t|)*4t,ttt||L", [1, 5, 1, 1]),
    ],
)
def test_layers_of_stages(flags: str, layers: list[int]):
    config = build(f"--pipeline-model-parallel-size 4 {flags}", world_size=4)
    assert stage_layers(config) == layers and sum(layers) == config.model.num_layers


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--num-layers 7", "--num-layers 7 .* use 4 or 8"),
        ("--num-layers 8 --account-for-loss-in-pipeline-split", "--account-for-loss-in-pipeline-split, .* use 7 or 11"),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 3",
         "--decoder-first-pipeline-num-layers 3 of --num-layers 8"),
        ("--num-layers 8 --decoder-last-pipeline-num-layers 8", "leave 0 layers for the other 3"),
        ("--num-layers 8 --decoder-first-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
         "--decoder-first-pipeline-num-layers 2 and --account-for-loss-in-pipeline-split"),
        ("--num-layers 10 --decoder-first-pipeline-num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
         "--num-virtual-stages-per-pipeline-rank"),
        ("--num-layers 4 --pipeline-model-parallel-layout Et|t|t|tx", "has other letters than E"),
        ("--num-layers 4 --pipeline-model-parallel-layout Et|t|t|L", "must hold E, 4 t and L"),
        ("--num-layers 4 --pipeline-model-parallel-layout Et*999999999|L", "more than 100000 letters with t.999999999"),
        ("--num-layers 4 --pipeline-model-parallel-layout E(t*9999)*9999|L", "more than 100000 letters with t.9999"),
        ("--num-layers 4 --mtp-num-layers 1 --pipeline-model-parallel-layout Et|t|t|tL", "must hold E, 4 t, 1 m and L"),
        ("--num-layers 4 --pipeline-model-parallel-layout Et|t|ttL", "has 3 stages, for --pipeline-model-parallel-"),
        ("--num-layers 4 --pipeline-model-parallel-layout Et|t|t|tL --num-virtual-stages-per-pipeline-rank 2",
         "has 4 stages, for --pipeline-model-parallel-size 4 and --num-virtual-stages-per-pipeline-rank 2"),
        ("--num-layers 4 --pipeline-model-parallel-layout Et|t|t|tL --decoder-first-pipeline-num-layers 1",
         "and --decoder-first-pipeline-num-layers both set"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_divided_as_asked(flags: str, words: str):
    with pytest.raises(Refusal, match=words):
        build(f"--pipeline-model-parallel-size 4 {flags}", world_size=4)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--decoder-first-pipeline-num-layers 3 --recompute-num-layers 4",
         "units of --recompute-num-layers 4 .* 3 and 5"),
        ("--num-layers 6 --recompute-num-layers 2", "does not cut stages of 3 layers: use 1"),
        ("--num-layers 6 --recompute-num-layers 2 --fpdt --fpdt-chunk-size 32",
         "does not cut stages of 3 layers: use 1"),
        ("--recompute-num-layers 6", "more than the 4 layers of a stage: use at most 4"),
        ("--num-layers 6 --pipeline-model-parallel-layout Ett|ttt|t|L --recompute-num-layers 2",
         "does not cut stages of 1 and 2 and 3 layers: use 1"),
    ],
)  # fmt: skip
def test_recompute_on_stages(flags: str, words: str):
    recompute = "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform"
    with pytest.raises(Refusal, match=words):
        build(f"{recompute} {flags}", world_size=2)


def test_a_dropout_without_effect_is_refused():
    with pytest.raises(Refusal, match="--attention-dropout 1e-06 is too small to be distinguished from 0"):
        build("--attention-dropout 1e-6")


def test_a_flag_that_megatron_lm_does_not_read_gets_a_note():
    config = build("--recompute-method uniform --recompute-num-layers 1 --exit-interval 0")
    assert config.attention.recompute_method is None and config.run.exit_interval is None
    assert any("no effect without --recompute-granularity: --recompute-method" in note for note in config.notes)
