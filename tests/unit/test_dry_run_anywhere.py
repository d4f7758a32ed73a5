# SPDX-License-Identifier: Apache-2.0
"""Dry runs of launch commands for other machines. This machine has no FP8, Transformer Engine, tokenizer or data files,
and launchers may start a process per GPU."""

import importlib.util
import json
import os
import shlex
from pathlib import Path

import pytest

from megatron.simulator.command import simulate
from megatron.simulator.cost.seconds import kernel_seconds
from megatron.simulator.cost.trace import Kernel
from megatron.simulator.dry_run.dry_run import dry_run
from megatron.simulator.dry_run.one_rank import vocabulary_of
from megatron.simulator.dry_run.recording.fp8 import held_by
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.parser import parse
from megatron.training.pretrain import main
from megatron.training.refusal import Refusal
from tests.distributed.flags import LLAMA
from tests.program import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RECIPE = json.loads((Path(__file__).parent / "data" / "train_llama3_8b_h100_fp8.json").read_text())
LAYERS, HIDDEN, FFN, LENGTH = 2, 128, 256, 512
TINY = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads 8 --dry-run "
    f"--seq-length {LENGTH} --max-position-embeddings {LENGTH} --micro-batch-size 1 --global-batch-size 2 --bf16"
)
NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 300"


@pytest.mark.full
def test_nvidias_fp8_recipe_with_two_flags_added(capsys, tmp_path):
    """The complete train_llama3_8b_h100_fp8.sh (NVIDIA/Megatron-LM) on Ulysses 4 x Ring 2 of eight H100."""
    file = tmp_path / "result.json"
    added = "--ulysses-parallel-size 4 --ring-parallel-size 2"
    simulated = f"--dry-run --world-size 8 --gpu H100-80G --dry-run-json {file}"
    assert main(shlex.split(f"{RECIPE['flags']} {added} {simulated}"), simulate=simulate) == 0
    output = capsys.readouterr().out
    assert "--fp8-format hybrid is not run" in output and "of the bf16 peak" in output and "the step fits" in output
    result = json.loads(file.read_text())
    (rank,) = result["ranks"]
    assert (rank["layers"], rank["micro_batches"], rank["micro_batches_run"]) == (32, 128, 3)
    # Weights in bf16 and, except embeddings, twice in FP8; gradients in bf16.
    linear, embeddings = 32 * 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3), 2 * 128384 * 4096
    kinds = rank["device_peak_by_kind"]
    assert kinds["parameters"] == pytest.approx(4 * linear + 2 * embeddings, rel=1e-3)
    assert kinds["gradients"] == pytest.approx(2 * (linear + embeddings), rel=1e-3)
    assert 5_000 < result["predicted_ms"] < 30_000 and result["fits"]


def fp8_run(flags="", gpu="H100-80G", ranks=1):
    config = parse(f"{TINY} {NUMBERS} {flags}".split(), LLAMA, ranks)
    return dry_run(config, ranks, gpu and load(gpu), vocab_size=301).ranks[0].figures


WEIGHTS = LAYERS * HIDDEN * (4 * HIDDEN + 3 * FFN)
HISTORIES = LAYERS * 4 * 5 * 4 * 1025


@pytest.mark.parametrize(
    ("recipe", "gpu", "weights", "saved"),
    [
        ("delayed --fp8-amax-history-len 1024", "H100-80G", 2 * WEIGHTS + HISTORIES, 1),
        pytest.param("tensorwise", "H100-80G", 2 * WEIGHTS, 1, marks=pytest.mark.full),
        pytest.param("tensorwise", "B200-192G", WEIGHTS, 1, marks=pytest.mark.full),
        pytest.param("blockwise", "H100-80G", 2 * WEIGHTS * (1 + 4 / 128), 1 + 4 / 128, marks=pytest.mark.full),
        ("mxfp8", "B200-192G", 2 * WEIGHTS * (1 + 1 / 32), 1 + 1 / 32),
        pytest.param("delayed", None, 2 * WEIGHTS + HISTORIES // 1025 * 2, 1, marks=pytest.mark.full),
    ],
)
@pytest.mark.usual(1)
def test_memory_is_what_transformer_engine_holds(recipe, gpu, weights, saved):
    plain, result = fp8_run(gpu=gpu), fp8_run(f"--fp8-format hybrid --fp8-recipe {recipe}", gpu)
    plain, result = (
        plain.peaks["backward" if gpu is None else "forward"],
        result.peaks["backward" if gpu is None else "forward"],
    )
    assert result["parameters"] - plain["parameters"] == weights
    # The inputs of all four products are kept in FP8. With bf16, attention keeps one of them, its output, anyway.
    inputs, kept = LENGTH * (3 * HIDDEN + FFN), LENGTH * HIDDEN
    assert result["activations"] - plain["activations"] == LAYERS * (saved * inputs - 2 * (inputs - kept))


def test_products_run_at_the_rate_of_fp8():
    machine = load("H100-80G")
    wide, flops = (1, 8192, 8192, 8192), 2.0 * 8192**3
    seconds = [kernel_seconds(Kernel("mm", "gemm", flops, 1, wide, size), machine) for size in (1, 2)]
    faster = machine.peak["fp8"] / machine.peak["bf16"] * machine.calibration.fp8
    assert seconds[1] / seconds[0] == pytest.approx(faster)
    flags = "--hidden-size 2048 --ffn-hidden-size 8192 --seq-length 4096 --max-position-embeddings 4096"
    plain, result = fp8_run(flags), fp8_run(f"{flags} --fp8-format e4m3")
    assert result.flops == plain.flops
    share = result.exposed["gemm"] / plain.exposed["gemm"]
    assert 1 / faster < share < 1 / faster + 0.1  # not 1 / faster, because the output layer runs in bf16
    assert result.exposed["memory"] > plain.exposed["memory"]  # casts


@pytest.mark.parametrize(
    "sequence", ["--sequence-parallel", pytest.param("", marks=pytest.mark.full)], ids=["sequence parallel", "TP alone"]
)
def test_tp_gathers_in_fp8_and_sums_in_bf16(sequence):
    flags = f"--tensor-model-parallel-size 2 {sequence}"
    plain, result = fp8_run(flags, ranks=2), fp8_run(f"{flags} --fp8-format hybrid", ranks=2)
    gathers = 6 * LAYERS * 2 if sequence else 0  # per layer: inputs in both passes, and gradients
    assert plain.communication["tp"] - result.communication["tp"] == gathers * LENGTH * HIDDEN // 2
    assert result.flops == plain.flops


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
        (4, "--pipeline-model-parallel-size 2 --ring-parallel-size 2 --zero-stage 1 --add-qkv-bias"),
        (2, "--swiglu --normalization LayerNorm --ulysses-parallel-size 2 --global-batch-size 16"),
    ],
)
def test_fp8_with_other_settings(ranks, flags):
    plain, result = fp8_run(flags, ranks=ranks), fp8_run(f"{flags} --fp8-format hybrid", ranks=ranks)
    assert (result.flops, result.communication) == (plain.flops, plain.communication)
    assert result.seconds["step"] > 0


def test_layers_of_megatron_core_replace_those_of_transformer_engine(capsys):
    flags = f"{TINY} {NUMBERS} --transformer-impl transformer_engine"
    assert main(flags.split(), LLAMA, simulate) == 0
    assert "megatron-core's layers stand for Transformer Engine's" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is not None, reason="it is installed")
@pytest.mark.parametrize("flags", ["--transformer-impl transformer_engine", "--fp8-format hybrid"])
def test_training_without_transformer_engine_is_refused(flags):
    run = f"{TINY} {NUMBERS} --train-iters 1 --lr 1e-3 --mock-data {flags}".replace("--dry-run ", "")
    with pytest.raises(Refusal, match="Transformer Engine"):
        parse(run.split(), LLAMA, 1)


@pytest.mark.parametrize(
    ("flags", "output"),
    [
        ("--gpu A100-80G", "--fp8-format hybrid: A100-80G has no FP8"),
        ("--gpu H100-80G --fp8-recipe mxfp8", "--fp8-recipe mxfp8: H100-80G has no MXFP8"),
    ],
)
def test_a_gpu_without_fp8_is_refused(flags, output, capsys):
    assert main(f"{TINY} {NUMBERS} --fp8-format hybrid {flags}".split(), LLAMA, simulate) == 2
    assert output in capsys.readouterr().err


def test_blackwell_needs_one_copy_for_scales_of_tensors():
    config = parse(f"{TINY} {NUMBERS} --fp8-format hybrid".split(), LLAMA, 1)
    assert held_by(config.model, load("H100-80G")).copies == 2
    assert held_by(config.model, load("B200-192G")).copies == 1


@pytest.mark.parametrize(
    ("flags", "size", "output"),
    [
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B", 128256, "Llama-3.1-8B"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /nfs/hf/Qwen2.5-7B", 151665, "assumed"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /x --vocab-size 5000", 5000, "from --vocab-size"),
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model /data/tokenizer.model", 32000, "as Llama-2 has"),
        ("--tokenizer-type Llama2Tokenizer", 32000, "as Llama-2 has"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file /d/vocab.json --merge-file /d/merges.txt", 50257, "GPT-2"),
        ("--vocab-file /d/vocab.json --merge-file /d/merges.txt", 50257, "GPT-2"),
        ("--tokenizer-type TikTokenizer --tokenizer-model /d/multiMixV8.json", 131072, "TikTokenizer"),
        ("--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /d/mistral_7b.model", 32000, "mistral"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /x --model llama3-8b", 128256, "--model llama3-8b"),
        ("--model llama2-7b", 32000, None),
        ("--tokenizer-type ByteLevelTokenizer", 257, None),
        (NUMBERS, 301, None),
    ],
)
def test_the_vocabulary_by_flags_or_by_name(flags, size, output):
    config = parse(f"{TINY} --data-path /nowhere/text_document {flags}".split(), LLAMA, 1)
    result, note = vocabulary_of(config)
    assert result == size
    assert output is None or output in note


@pytest.mark.parametrize(
    "flags",
    ["", pytest.param("--reset-attention-mask --recompute-granularity selective", marks=pytest.mark.full)],
)
def test_megatrons_own_dropout(flags, capsys):
    """Default dropout of 0.1, whose sample numbers are real tensors among fake ones."""
    small = f"{TINY} {NUMBERS} --num-layers 1 --gpu H100-80G --ulysses-parallel-size 2 --world-size 2 {flags}"
    assert main(small.split(), simulate=simulate) == 0
    assert "--attention-dropout 0.1: on a GPU Triton's kernel computes it" in " ".join(capsys.readouterr().out.split())


def test_an_unknown_vocabulary_size_is_refused(capsys):
    flags = f"{TINY} --tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/ours"
    assert main(flags.split(), LLAMA, simulate) == 2
    assert "(/models/ours), and the vocabulary size is unknown: add --vocab-size N" in capsys.readouterr().err


def test_without_data_or_tokenizer_files(capsys):
    flags = f"{TINY} --data-path 0.3 /nowhere/a 0.7 /nowhere/b --split 99,1,0 --save /nowhere --save-interval 5"
    flags += " --num-layers 1 --tokenizer-type Llama2Tokenizer --tokenizer-model /nowhere/tokenizer.model"
    assert main(flags.split(), LLAMA, simulate) == 0
    assert "32000 tokens are assumed, as Llama-2 has; --vocab-size N changes this" in " ".join(
        capsys.readouterr().out.split()
    )


def test_one_process_of_a_launcher_simulates_all_ranks():
    flags = f"{TINY} {NUMBERS} --num-layers 1 --ulysses-parallel-size 4 --gpu H100-80G --global-batch-size 1"
    done = run_ranks(ROOT / "pretrain_llama.py", flags.split(), {**os.environ, "OMP_NUM_THREADS": "1"}, 4)
    assert [one.returncode for one in done] == [0] * 4
    assert "on 4 x H100-80G" in done[0].stdout and "sent over ulysses" in done[0].stdout
    assert not any(one.stdout or one.stderr for one in done[1:])


def test_other_ranks_end_before_flags_are_read(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert main(["--dry-run", "--no-such-flag"], LLAMA, simulate) == 0
    output = capsys.readouterr()
    assert not output.out and not output.err


def test_the_flag_world_size_overrides_that_of_the_launcher(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"{TINY} {NUMBERS} --num-layers 1 --gpu H100-80G --global-batch-size 8 --world-size 8"
    assert main(flags.split(), LLAMA, simulate) == 0
    assert "on 8 x H100-80G" in " ".join(capsys.readouterr().out.split())
