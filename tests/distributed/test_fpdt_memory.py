# SPDX-License-Identifier: Apache-2.0
"""Device and host bytes of a step in chunks, model states excluded, counted tensor by tensor (benchmarks/memory.py)."""

from __future__ import annotations

from functools import cache

import pytest

from benchmarks.memory import MODES, measure

WIDTH, CHUNK = 64, 256
SHAPE = f"""--num-layers 4 --hidden-size {WIDTH} --num-attention-heads 4 --vocab-size 3999 --micro-batch-size 1
--train-iters 1 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 --device cpu
--hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope --normalization RMSNorm
--untie-embeddings-and-output-weights"""


@pytest.fixture(scope="module")
def bytes_of(pool):
    """Device and host bytes of a mode at a length."""

    @cache
    def look(mode: str, length: int, chunk: int = CHUNK) -> dict[str, int]:
        flags = f"{SHAPE} --seq-length {length} --max-position-embeddings {length} {MODES[mode].format(chunk=chunk)}"
        flags += f" --loss-chunks {length // 16}" if "--fpdt" in flags else ""
        return pool.run(measure, 1, flags.split(), timeout=120)[0]

    return look


def test_chunks_need_a_fraction_of_what_recompute_and_plain_layers_hold(bytes_of):
    fpdt, recompute, plain = (bytes_of(mode, 2048, 256)["device"] for mode in ("fpdt-inputs", "recompute", "plain"))
    assert recompute > 10 * fpdt and plain > 20 * fpdt, (fpdt, recompute, plain)


@pytest.mark.parametrize("mode", [pytest.param("fpdt-inputs", marks=pytest.mark.full), "fpdt-recompute"])
def test_at_a_fixed_chunk_at_most_four_hidden_states_grow_with_the_sequence(bytes_of, mode):
    growth = bytes_of(mode, 2048)["device"] - bytes_of(mode, 1024)["device"]
    hidden = 1024 * WIDTH * 4
    assert growth <= 4.15 * hidden, f"{growth / hidden:.2f} hidden states"  # 0.15: token ids, labels, positions


@pytest.mark.parametrize("mode", [pytest.param("stream", marks=pytest.mark.full), "stream-recompute"])
def test_streamed_hidden_states_leave_nothing_that_grows_on_the_device(bytes_of, mode):
    short, long = bytes_of(mode, 1024), bytes_of(mode, 2048)
    assert long["device"] < 1.05 * short["device"]
    assert long["host"] == pytest.approx(2 * short["host"], rel=0.05)


def test_without_offload_nothing_is_in_host_memory(bytes_of):
    assert bytes_of("fpdt-device", 1024)["host"] == 0
    assert bytes_of("fpdt", 1024)["host"] > 0
    assert bytes_of("fpdt", 1024)["device"] < bytes_of("fpdt-device", 1024)["device"]
