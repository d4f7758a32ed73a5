# SPDX-License-Identifier: Apache-2.0
"""Ranks that come as flags: what the environment becomes, and what must agree with it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from megatron.training.arguments.argv import take_ranks
from megatron.training.arguments.parser import parse
from megatron.training.refusal import Refusal
from tests.patience import patience
from tests.program import start_forked

FLAGS = "--rank 3 --world-size 8 --local-rank 1 --dist-url tcp://host.of.0:34566"
SET = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host.of.0", "MASTER_PORT": "34566"}
RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 8 --mock-data --vocab-size 99 --train-iters 1 --eval-iters 0"
)


def test_flags_become_the_environment():
    for flags in (FLAGS, FLAGS.replace("-rank 1", "_rank 1"), FLAGS.replace(" tcp", "=tcp").replace("st-u", "st_u")):
        environment: dict[str, str] = {}
        take_ranks(flags.split(), environment)
        assert environment == SET
    environment = {"MASTER_ADDR": "a"}
    take_ranks("--rank 0 --world-size 1 --dist-url env://".split(), environment)
    assert environment == {"MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "1"}
    environment = {}
    take_ranks("--dist-url tcp://[::1]:5 --rank 0".split(), environment)
    assert environment["MASTER_ADDR"] == "::1"


@pytest.mark.parametrize("flags", ["--world-size 8", "--local-rank 1", f"--dry-run {FLAGS}", "--rank x", ""])
def test_without_a_rank_nothing_is_set(flags: str):
    environment: dict[str, str] = {}
    take_ranks(flags.split(), environment)
    assert environment == {}


@pytest.mark.parametrize(
    ("environment", "flags", "words"),
    [
        ({"RANK": "0"}, FLAGS, ("--rank 3", "RANK=0")),
        ({"WORLD_SIZE": "4"}, FLAGS, ("--world-size 8", "WORLD_SIZE=4")),
        ({"MASTER_PORT": "1"}, FLAGS, ("--dist-url 34566", "MASTER_PORT=1")),
        ({}, "--rank 0 --dist-url file:///a", ("--dist-url file:///a", "tcp://HOST:PORT")),
    ],
)
def test_what_differs_is_refused(environment: dict[str, str], flags: str, words: tuple[str, ...]):
    with pytest.raises(Refusal) as caught:
        take_ranks(flags.split(), dict(environment))
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)
    take_ranks(flags.split() if "file" not in flags else [], dict(SET))


def test_a_number_of_processes_that_is_right_says_nothing_new():
    with_it, without = (parse(f"{RUN} {more}".split(), world_size=8) for more in (FLAGS, ""))
    assert with_it.simulation.world_size == 8 and with_it.notes == without.notes
    for flags, words in (
        ("--world-size 4", "--world-size 4, and 8 processes were started"),
        ("--rank 0", "--world-size"),
    ):
        with pytest.raises(Refusal, match=words):
            parse(f"{RUN} {flags}".split(), world_size=8)


def test_a_run_whose_ranks_are_flags(tmp_path: Path):
    """Two processes as mpirun starts them: no RANK, WORLD_SIZE or MASTER_ADDR in their environment."""
    script = Path(__file__).parents[2] / "pretrain_gpt.py"
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": os.environ["PATH"]}
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{place.getsockname()[1]}"
    flags = f"{RUN} --device cpu --log-interval 1 --world-size 2 --dist-url {url}"
    folders = [tmp_path / str(rank) for rank in range(2)]
    processes = [
        start_forked(script, f"{flags} --rank {rank} --local-rank {rank}".split(), environment, folder)
        for rank, folder in enumerate(folders)
    ]
    for process in processes:
        process.join(patience(100))
    said = [(folder / name).read_text() for folder in folders for name in ("out", "err")]
    assert [process.exitcode for process in processes] == [0, 0], said
    assert "DP 2 x PP 1 on 2 x" in said[0] and "iteration" in said[0] and "iteration" not in said[2]
