# SPDX-License-Identifier: Apache-2.0
"""Bytes that one layer's kernels read and write: counted by hand here, and the tool that prints them."""

from __future__ import annotations

import json
import math

import pytest

from megatron.simulator.cost.layer_operations import UNFUSED_ROTARY_BYTES
from megatron.simulator.dry_run.traffic import REST, layer_traffic
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.models import LLAMA_DEFAULTS
from megatron.training.arguments.parser import parse
from tools import traffic

WORDS = "--num-layers 4 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 8 --group-query-attention "
WORDS += "--num-query-groups 4 --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --bf16 "
WORDS += "--tokenizer-type NullTokenizer --vocab-size 300"
TOKENS, HIDDEN, FFN, HEADS, KV, SIZE = 256, 64, 160, 8, 4, 8
QKV = HEADS * SIZE + 2 * KV * SIZE


def counted(more: str, gpus: int = 1, **how):
    config = parse(f"{WORDS} {more} --dry-run --world-size {gpus}".split(), LLAMA_DEFAULTS, gpus)
    return layer_traffic(config, gpus, 0, 301, load("A100-80G"), **how)


def test_a_layer_on_one_gpu() -> None:
    found = counted("")
    linear = [(HIDDEN, QKV), (HEADS * SIZE, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)]
    products = sum(2 * (TOKENS * (a + b) + a * b) for a, b in linear)
    assert found["GEMM"] == {"forward": products, "backward": 2 * products}
    numbers, angles = TOKENS * (HEADS + KV) * SIZE, TOKENS * SIZE // 2
    assert found["RoPE"] == dict.fromkeys(("forward", "backward"), 2 * 2 * numbers + 2 * 4 * angles)
    norm = 2 * 2 * 2 * (TOKENS * HIDDEN) + 2 * 2 * HIDDEN
    assert found["norm"]["forward"] == norm
    assert found["activation"]["forward"] == 2 * TOKENS * 3 * FFN
    weights = sum(a * b for a, b in linear) + 2 * HIDDEN
    assert found["weight gradients: fp32 sums"] == {"backward": (2 + 4 + 4) * weights}
    assert REST not in found and not [group for group in found if group.startswith(("all-to-all", "ring", "FPDT"))]


def test_rope_by_pytorch_reads_and_writes_eight_times_as_much() -> None:
    fused, plain = (counted("", fused_rope=fused)["RoPE"]["forward"] for fused in (True, False))
    assert plain > 7 * fused
    numbers = TOKENS * (HEADS + KV) * SIZE
    assert plain == pytest.approx(UNFUSED_ROTARY_BYTES * numbers, rel=0.13)  # and sine and cosine


def test_the_tool_prints_what_ulysses_and_a_ring_take(tmp_path, capsys) -> None:
    file = tmp_path / "bytes.json"
    words = f"{WORDS} --ulysses-parallel-size 2 --ring-parallel-size 2".split()
    assert traffic.main(["--gpus", "4", "--json", str(file), "--", *words]) == 0
    found, text = json.loads(file.read_text()), capsys.readouterr().out
    assert {"all-to-all: packing, unpacking", "ring: buffers", "attention: merges, sums, casts"} <= set(found)
    assert all(group in text for group in found) and math.isclose(found["RoPE"]["forward"], found["RoPE"]["backward"])


@pytest.mark.parametrize(
    "words, says",
    [
        (
            ["--gpus", "2", "--", *WORDS.split(), "--pipeline-model-parallel-size", "2"],
            "--pipeline-model-parallel-size",
        ),
        (["--rank", "1", "--", *WORDS.split()], "--rank 1"),
    ],
)
def test_refusals(words, says, capsys) -> None:
    assert traffic.main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")
