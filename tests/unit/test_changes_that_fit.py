# SPDX-License-Identifier: Apache-2.0
"""A dry run that does not fit names the cheapest changes of its command line that fit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron.simulator import command
from megatron.simulator.changes_that_fit import lines
from megatron.simulator.machines.machine_file import load
from megatron.training.arguments.argv import flat, options
from megatron.training.arguments.suggest import fixed
from megatron.training.pretrain import Possible, main
from megatron.training.refusal import Fix
from megatron.training.settings.config import Config

JOB = "--micro-batch-size 1 --train-iters 10 --lr 1e-4 --mock-data --bf16 --dry-run"
LLAMA = f"{JOB} --model llama3-8b --seq-length 131072 --world-size 8 --gpu H100"


def advice(flags: str) -> list[str]:
    """The lines about a command line, without its dry run."""
    result = []

    def simulate(config: Config, possible: Possible) -> int:
        result.extend(lines(config, config.simulation.world_size, load("H100"), 128256, possible))
        return 0

    assert main(flags.split(), simulate=simulate) == 0
    return result


def test_changes_are_possible_fit_and_are_priced():
    flags = f"{LLAMA} --context-parallel-size 8 --use-distributed-optimizer"
    first, *changes = advice(flags)
    assert "needs" in first and "of the 77.2 GiB that H100-80G has" in first and 1 <= len(changes) <= 3
    times = []
    for line in changes:
        use, without, seconds, size = re.fullmatch(
            r"  (--.*?)((?:, without --[\w-]+(?:, --[\w-]+)*)?): ([\d.]+) s a step, .*?, ([\d.]+) GiB.*", line
        ).groups()
        change = Fix(use, without.replace(", without ", "").replace(",", ""))
        assert not advice(shlex.join(flat(fixed(options(flags.split()), change)))), line  # now it fits
        times.append(float(seconds))
        assert float(size) < 77.2
    assert times == sorted(times)


def test_what_fits_gets_no_advice():
    assert not advice(f"{LLAMA} --context-parallel-size 8 --zero-stage 3 --recompute-granularity full "
                      "--recompute-method uniform --recompute-num-layers 1 --loss-chunks 16")  # fmt: skip


def test_if_nothing_fits_the_smallest_number_of_ranks_is_named():
    (line,) = advice(f"{LLAMA} --context-parallel-size 8".replace("llama3-8b", "llama3-70b"))
    assert line.endswith("and on 8 nothing does; --world-size 16 is the smallest number that suffices")


def test_the_advice_comes_before_the_simulation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def simulated(*_: object, **__: object) -> None:
        assert "changes that fit, the fastest first" in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.simulator.dry_run.dry_run.dry_run", simulated)
    assert main(f"{LLAMA} --context-parallel-size 8".split(), simulate=command.simulate) == 130


@pytest.mark.lab
def test_changes_fit_in_a_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    machine = tmp_path / "small.json"
    machine.write_text(json.dumps({"extends": "H100-80G", "memory": 9e9}))
    sizes = "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 32768 --vocab-size 32000"
    flags = f"{JOB} {sizes} --max-position-embeddings 32768 --swiglu --world-size 8 --gpu {machine} " \
            "--ulysses-parallel-size 4 --ring-parallel-size 2 --attention-dropout 0 --hidden-dropout 0"  # fmt: skip
    assert main(flags.split(), simulate=command.simulate) == 1
    changes = re.findall(r"^ >   (--.*?): [\d.]+ ", capsys.readouterr().out, re.MULTILINE)
    assert changes
    for change in changes:
        use, _, without = change.partition(", without ")
        words = flat(fixed(options(flags.split()), Fix(use, without.replace(",", ""))))
        assert main(words, simulate=command.simulate) == 0, change
