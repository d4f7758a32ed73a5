# SPDX-License-Identifier: Apache-2.0
"""Misspelt flags and other programs' names: each is answered with the flag that is meant."""

from __future__ import annotations

import re

import pytest

from megatron.training.arguments.foreign import megatron_flags
from megatron.training.arguments.parser import parse, supported_flags
from megatron.training.refusal import Refusal

MEANT = {  # what is written -> what is meant
    # misspelt
    "--num_layers 2": "--num-layers",
    "--num-layer 2": "--num-layers",
    "--hiddensize 64": "--hidden-size",
    "--hidden-sizes 64": "--hidden-size",
    "--seqlength 64": "--seq-length",
    "--num-attention-head 4": "--num-attention-heads",
    "--ffn-hidden-dim 4": "--ffn-hidden-size",
    "--micro-batchsize 1": "--micro-batch-size",
    "--globalbatch-size 1": "--global-batch-size",
    "--tensor-parallel-size 2": "--tensor-model-parallel-size",
    "--tensor-model-parallel 2": "--tensor-model-parallel-size",
    "--pipeline-parallel-size 2": "--pipeline-model-parallel-size",
    "--ulyses-parallel-size 2": "--ulysses-parallel-size",
    "--ring-parallel 2": "--ring-parallel-size",
    "--context-parallel 2": "--context-parallel-size",
    "--sequence-paralel": "--sequence-parallel",
    "--distributed-optimizer": "--use-distributed-optimizer",
    "--rotary-pct 1": "--rotary-percent",
    "--untie-embeddings": "--untie-embeddings-and-output-weights",
    "--dissable-bias-linear": "--disable-bias-linear",
    "--lr-warmup-iter 1": "--lr-warmup-iters",
    "--recompute-activation": "--recompute-activations",
    "--weightdecay 0.1": "--weight-decay",
    "--save-intervall 5": "--save-interval",
    "--BF16": "--bf16",
    "--fpdt-chunksize 64": "--fpdt-chunk-size",
    "--offload-checkpoint": "--offload-checkpoints",
    # USP, yunchang, LoongTrain
    "--ulysses-degree 2": "--ulysses-parallel-size",
    "--ulysses_degree 2": "--ulysses-parallel-size",
    "--sp_ulysses_degree 2": "--ulysses-parallel-size",
    "--head_size 2": "--ulysses-parallel-size",
    "--ring-degree 2": "--ring-parallel-size",
    "--sp_ring_degree 2": "--ring-parallel-size",
    "--context_size 2": "--ring-parallel-size",
    "--ring_impl_type zigzag": "--context-parallel-balance",
    # DeepSpeed, FPDT
    "--ds-sequence-parallel 2": "--ds-sequence-parallel-size",
    "--ds-sequence-parallel-fpdt-offload": "--ds-sequence-parallel-fpdt-offloading",
    "--fpdt-offloading": "--fpdt-offload",
    # Hugging Face and others
    "--rope-theta 500000": "--rotary-base",
    "--num-hidden-layers 2": "--num-layers",
    "--intermediate-size 64": "--ffn-hidden-size",
    "--num-kv-heads 2": "--num-query-groups",
    "--rms-norm-eps 1e-5": "--norm-epsilon",
    "--sliding-window 4096": "--window-size",
    "--max-seq-len 64": "--seq-length",
    "--learning-rate 1e-4": "--lr",
    "--gradient-checkpointing": "--recompute-granularity",
    "--max_grad_norm 1": "--clip-grad",
    "--per_device_train_batch_size 1": "--micro-batch-size",
    "--tp-size 2": "--tensor-model-parallel-size",
    "--cp_size 2": "--context-parallel-size",
}

TAKEN = {  # what is written -> section.field and its value
    "--ds-sequence-parallel-size 4": ("parallel.ulysses_parallel_size", 4),
    "--ulysses-degree-in-cp 4": ("parallel.ulysses_parallel_size", 4),
    "--ds-sequence-parallel-fpdt": ("chunks.fpdt", True),
    "--ds-sequence-parallel-fpdt-chunk-size 64": ("chunks.fpdt_chunk_size", 64),
    "--ds-sequence-parallel-fpdt-offloading": ("chunks.fpdt_offload", True),
    "--rotary-position-embeddings-theta 500000": ("model.rotary_base", 500000),
    "--num-key-value-heads 4": ("model.num_query_groups", 4),
    "--context-parallel-algo ulysses_cp_algo": ("parallel.cp_comm_type", ["a2a"]),
    "--context-parallel-algo megatron_cp_algo": ("parallel.cp_comm_type", ["p2p"]),
    "--context-parallel-algo hybrid_cp_algo": ("parallel.cp_comm_type", ["a2a+p2p"]),
    "--tokenizer-name-or-path x": ("data.tokenizer_model", "x"),
    # values in other programs' way
    "--bf16 true": ("optimizer.bf16", True),
    "--bf16=True": ("optimizer.bf16", True),
    "--bf16 false": ("optimizer.bf16", False),
    "--disable-bias-linear true": ("model.add_bias_linear", False),
    "--window-size -1,0": ("attention.window_size", (-1, 0)),
    "--window-size=-1,0": ("attention.window_size", (-1, 0)),
    "--window-size (127,0)": ("attention.window_size", (127, 0)),
    "--window-size 127 0": ("attention.window_size", (127, 0)),
    "--window-size -1 0": ("attention.window_size", (-1, 0)),
    "--window-size [127, 0]": ("attention.window_size", (127, 0)),
    "--hierarchical-context-parallel-sizes 2,4": ("parallel.hierarchical_context_parallel_sizes", [2, 4]),
    "--hierarchical-context-parallel-sizes [2, 4]": ("parallel.hierarchical_context_parallel_sizes", [2, 4]),
    "--rampup-batch-size 16,16,1000": ("data.rampup_batch_size", [16, 16, 1000]),
    "--data-path ['a','b']": ("data.data_path", ["a", "b"]),
    "--data-path a,b": ("data.data_path", ["a,b"]),
}

NOTED = ["--use-cp-send-recv-overlap", "--cp-window-size 2", "--use-fused-rmsnorm", "--use-flash-attn true"]


def refused(flags: str) -> str:
    with pytest.raises(Refusal) as caught:
        parse(flags.split())
    return str(caught.value)


@pytest.mark.parametrize("written", MEANT)
def test_the_flag_that_is_meant_is_named(written: str):
    message = refused(written)
    assert message.startswith(written.split()[0]) and MEANT[written] in re.findall(r"--[a-z][\w-]*", message), message


def test_what_is_unlike_all_flags_gets_no_suggestion():
    for flag in ("--qwertyuiop", "--handle", "--a", "--model-family"):
        assert refused(f"{flag} 3") == f"{flag} is not a known flag: --help lists them"


@pytest.mark.parametrize("written", TAKEN)
def test_what_means_the_same_is_taken(written: str):
    name, value = TAKEN[written]
    section, field = name.split(".")
    assert getattr(getattr(parse(written.split()), section), field) == value


def test_false_where_nothing_would_mean_true_is_refused():
    for flag in ("--fpdt-offload", "--ds-sequence-parallel-fpdt-offloading", "--exit-signal-handler"):
        assert refused(f"{flag} false") == f"'false' after {flag} belongs to no flag: quote values that hold spaces"


@pytest.mark.parametrize("written", NOTED)
def test_what_cannot_change_the_result_is_noted(written: str):
    (note,) = parse(written.split()).notes
    assert written.split()[0] in note


def test_no_suggestion_is_itself_refused():
    """Neither those of the tables, nor the nearest of a flag with a letter less."""
    rows = megatron_flags.rows()
    wrong = {flag for flag, row in rows.items() if row.verdict == "refused"}
    for flag, row in rows.items():
        if row.verdict == "refused":
            advice = re.findall(r"(?<=use )(?:--[\w-]+)", row.reason)
            assert not wrong & set(advice), f"{flag}: {row.reason}"
    for flag in sorted([*wrong, *supported_flags()])[::8]:
        if flag[:-1] not in rows and flag[:-1] not in supported_flags():
            named = re.findall(r"did you mean (--[\w-]+)", refused(flag[:-1]))
            assert not wrong & set(named), named
