# SPDX-License-Identifier: Apache-2.0
"""The FPDT benchmark: every mode's flags are accepted, and its figures become files and a picture. Peers are judged."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import fpdt, fpdt_report, peers
from megatron.training.arguments.models import LLAMA_DEFAULTS
from megatron.training.arguments.parser import parse
from tests.patience import patience

ROOT = Path(__file__).parents[2]


def benchmark(monkeypatch: pytest.MonkeyPatch, *words: str):
    monkeypatch.setattr(sys, "argv", ["fpdt.py", "--device", "cpu", *words])
    return fpdt.arguments()


@pytest.mark.parametrize("model", [(), ("--model", "gpt-2.7b"), ("--model", "llama3-8b"), ("--kv-heads", "2")])
@pytest.mark.parametrize("mode", list(fpdt.MODES))
def test_flags_of_every_mode_are_accepted(mode: str, model: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    args = benchmark(monkeypatch, *model, "--compare", mode)
    run = fpdt.Run(mode, 8 if "fpdt" in mode else None)
    config = parse(fpdt.flags(run, args), LLAMA_DEFAULTS, 1)
    assert config.chunks.fpdt == ("fpdt" in mode)
    assert config.chunks.loss_chunks == 2 * -(-args.vocab_size // config.model.hidden_size)
    assert mode in args.modes and fpdt_report.REFERENCE in args.modes


def test_figures_become_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    args = benchmark(monkeypatch, "--chunks", "1", "4")
    report = {"problem": {**vars(args), "peak_flops": 1e11}, "load_at_start": 0.0, "rows": []}
    for chunks in args.chunks:
        group = [fpdt.Run(mode, chunks if "fpdt" in mode else None) for mode in args.modes]
        for number, run in enumerate(group):
            step = {"seconds": 1.0 + number, "cpu_seconds": 2.0, "foreign": 0.0, "flops": 1e10, "peak_flops": None}
            run.steps = [step, step]
            run.memory = {"states": 2**30, "activations": 2**28, "host": 0, "to_host": 0, "to_device": 0}
        group[-1].steps, group[-1].memory, group[-1].failed = [], {}, "out of memory"
        report["rows"] += [fpdt.row(run, group[0], args, 1e11) for run in group]
    fpdt_report.write(report, tmp_path / "sweep")
    fpdt_report.show(report)

    assert json.loads((tmp_path / "sweep.json").read_text())["rows"][1]["of_reference"] == 0.5
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == 2 * len(args.modes)
    assert (tmp_path / "sweep.png").stat().st_size > 5000
    assert "out of" in capsys.readouterr().out  # the table may break the line


@pytest.mark.full
def test_peers_are_judged_by_one_process(tmp_path: Path) -> None:
    """Ours are right in every case that they take; and the judge tells what is not."""
    argv = ["--processes", "2", "--seq-length", "64", "--repeats", "1", "--json", str(tmp_path / "peers.json")]
    subprocess.run([sys.executable, "benchmarks/peers.py", *argv], check=True, cwd=ROOT, timeout=patience(300))
    found = json.loads((tmp_path / "peers.json").read_text())
    refused = {"ours, Ulysses 2": {"3 heads", "255 tokens"}, "ours, Ring 2": {"255 tokens"}}
    for party, cannot in refused.items():
        assert {case for case, errors in found["cases"].items() if isinstance(errors[party], str)} == cannot
        assert all(errors[party] < 1e-5 for case, errors in found["cases"].items() if case not in cannot)
        assert len(found["seconds"][party]) == peers.STEPS
    assert peers.verdict(0.3) == "WRONG, by 30 %" and peers.verdict(1e-6).startswith("right")
