# SPDX-License-Identifier: Apache-2.0
"""Published numbers compared with ours: errors, words, tables, files, pictures; and the run_all scripts."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.reproduce import report
from examples.reproduce.report import Row
from megatron.training.arguments.parser import parse
from megatron.training.settings.models import LLAMA_DEFAULTS
from tests.patience import patience

REPRODUCE = Path(report.__file__).parent


def row(published, ours, unit="ms", **label) -> Row:
    return Row({"model": "7b", **label}, published, ours, "simulated", unit)


@pytest.mark.parametrize(
    "published, ours, error, agrees",
    [
        (200.0, 210.0, 5.0, None),
        (200, 150, -25.0, None),
        (0.0, 1.0, None, None),
        ("OOM", "OOM", None, True),
        ("OOM", 12.0, None, False),
        (12.0, "OOM", None, False),
        (None, 12.0, None, None),
        (12.0, None, None, None),
    ],
)
def test_error_of_a_row(published, ours, error, agrees):
    result = row(published, ours)
    assert result.error == pytest.approx(error) if error is not None else result.error is None
    assert result.agrees is agrees and result.doublings is None


def test_lengths_are_compared_in_doublings():
    assert row(131072, 524288, "tokens").doublings == 2
    assert row(131072, 65536, "tokens").doublings == -1
    assert row("OOM", 65536, "tokens").doublings is None


def test_marks_are_measured_or_simulated():
    with pytest.raises(ValueError, match="measured or simulated, not 'guessed'"):
        Row({}, 1.0, 1.0, "guessed", "ms")


def test_published_numbers_are_read_as_numbers():
    rows = report.published("genslm_throughput_33b_32xA100_40G_tp32")
    assert rows[0] == {"seq_length": 2048, "old_megatron_deepspeed_tflops": 25, "new_megatron_deepspeed_tflops": 68}
    assert rows[-1]["old_megatron_deepspeed_tflops"] == "OOM"
    assert isinstance(report.published("ulysses_scaling")[0]["step_ms"], float)
    with pytest.raises(FileNotFoundError, match="there are fpdt_figure_11_mfu, "):
        report.published("usp_table_9")


def test_every_published_file_is_described():
    described = (report.PUBLISHED / "README.md").read_text()
    for file in report.PUBLISHED.glob("*.csv"):
        assert f"`{file.name}`" in described and report.published(file.stem), file


@pytest.mark.parametrize("options", [{}, {"over": "seq_length"}, {"over": "seq_length", "panel": "model", "log": True}])
def test_write(options, tmp_path, capsys):
    rows = [
        row(100.0, 110.0, seq_length=8192),
        row(200.0, 150.0, seq_length=16384),
        row("OOM", "OOM", seq_length=131072),
        Row({"model": "30b", "seq_length": 8192}, None, 3, "measured", "GB", "a note"),
        row(8192, 16384, "tokens", seq_length=8192),
    ]
    mean = report.write(tmp_path / "new", "table_9", "Paper, table 9", rows, **options)
    assert mean == pytest.approx((10 + 25 + 100) / 3)
    message = capsys.readouterr().out
    for words in ("Paper, table 9", "ours: simulated and measured", "+10.0 %", "same", "+1.00", "a note", "16,384"):
        assert words in message
    assert "mean absolute error 45.0 % over 3 of 5 rows: ms 17.5 %, tokens 100.0 %" in message
    assert "words: 1 of 1 the same" in message
    result = list(csv.DictReader((tmp_path / "new" / "table_9.csv").open()))
    assert [r["ours"] for r in result] == ["110.0", "150.0", "OOM", "3", "16384"]
    assert float(result[1]["error_percent"]) == pytest.approx(-25) and result[3]["published"] == ""
    assert result[2]["same"] == "True" and result[4]["doublings"] == "1.0"
    assert (tmp_path / "new" / "table_9.png").stat().st_size > 5000


def test_one_unit_may_be_logarithmic(tmp_path, monkeypatch):
    from matplotlib import pyplot

    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    report.write(tmp_path, "t", "T", [row(1.0, 2.0), row(4096, 8192, "tokens")], log="tokens")
    assert {axes.get_xlabel(): axes.get_xscale() for axes in drawn[0].axes} == {"ms": "linear", "tokens": "log"}


def test_the_caller_may_draw(tmp_path):
    drawn = []
    mean = report.write(tmp_path, "figure_9", "Paper, figure 9", [row(None, 1.0)], draw=drawn.append)
    assert mean is None and len(drawn) == 1 and (tmp_path / "figure_9.png").exists()


def test_no_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="Paper, table 9: no rows"):
        report.write(tmp_path, "table_9", "Paper, table 9", [])


def test_each_command_writes_to_a_separate_folder():
    parser = report.command(str(REPRODUCE / "usp" / "figure_3.py"), "about")
    assert parser.parse_args([]).out_dir == Path("out/reproduce/usp/figure_3")
    assert parser.parse_args(["here"]).out_dir == Path("here")


def test_a_table_of_a_paper_is_written_where_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    measured, printed = [], []

    def rows(measure: bool) -> list[Row]:
        measured.append(measure)
        return [row(1.0, 2.0)]

    table = report.PaperTable("Paper, table 5", "about", rows, then=printed.extend)
    file, tables = str(tmp_path / "usp" / "tables.py"), {"table_5": table, "figure_6": table}
    report.run_tables(file, "of a paper", tables, ["table_5"])
    report.run_tables(file, "of a paper", tables, ["figure_6", "here", "--measure"])
    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv")]
    assert sorted(written) == ["here/figure_6.csv", "out/reproduce/usp/table_5/table_5.csv"]
    assert measured == [False, True] and len(printed) == 2
    capsys.readouterr()
    report.run_tables(file, "of a paper", tables, ["--names"])
    assert capsys.readouterr().out == "table_5\nfigure_6\n"
    with pytest.raises(SystemExit):
        report.run_tables(file, "of a paper", tables, ["table_9"])
    assert "invalid choice: 'table_9'" in capsys.readouterr().err


def copied(tmp_path: Path, names: list[str], stub: str) -> Path:
    """The folder examples/reproduce with these files in its own tree, whose Python is the shell script ``stub``."""
    folder, python = tmp_path / "tree" / "examples" / "reproduce", tmp_path / "python"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPRODUCE / name, folder / name)
    python.write_text(f"#!/bin/sh\n{stub}\n")
    python.chmod(0o755)
    (tmp_path / "tree" / "scripts").mkdir()
    (tmp_path / "tree" / "scripts" / "setup.sh").write_text(f"echo {python}\n")
    return folder


def test_run_all_runs_every_command(tmp_path):
    """The script runs in a copy of the tree. Commands there only record their arguments, and one of them fails."""
    stub = '[ "$2" != --names ] || set table_5 table_6\necho "$@"'
    folder = copied(tmp_path, ["run_all.sh", "run_folder.sh"], stub)
    for name in ("usp/figure_6.sh", "usp/counting.py", "fpdt/figure_14.sh", "genslm/section_2.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("echo shell $*\nexit 3\n" if "figure_14" in name else "echo shell $*\n")
    command = ["bash", str(folder / "run_all.sh"), str(tmp_path / "out")]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 1 and "error: failed: examples/reproduce/fpdt/figure_14.sh" in done.stderr
    reports = {str(p.parent.relative_to(tmp_path / "out")): p.read_text() for p in tmp_path.glob("out/**/report.txt")}
    tables = [f"{paper}/table_{number}" for paper in ("fpdt", "genslm", "ulysses", "usp") for number in (5, 6)]
    assert sorted(reports) == sorted(["fpdt/figure_14", "genslm/section_2", "usp/figure_6", *tables])
    assert reports["usp/table_5"] == f"examples/reproduce/usp/tables.py table_5 {tmp_path}/out/usp/table_5\n"
    assert reports["genslm/section_2"] == f"examples/reproduce/genslm/section_2.py {tmp_path}/out/genslm/section_2\n"
    assert reports["usp/figure_6"] == f"shell {tmp_path}/out/usp/figure_6\n"


@pytest.mark.parametrize("script, runs", [("usp/figure_6", 2), ("fpdt/figure_14", 3), ("ulysses/figure_8", 5)])
def test_curves_are_of_the_same_training(script: str, runs: int, tmp_path: Path):
    """All runs of a figure are accepted and differ only in how the work is distributed."""
    captured = tmp_path / "captured"
    folder = copied(tmp_path, [f"{script}.sh", "convergence.sh"], f'printf "%s\\n" "$@" "" >>{captured}')
    command = ["bash", str(folder / f"{script}.sh"), "out/here"]
    done = subprocess.run(
        command, env={**os.environ, "DEVICE": "cpu"}, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == 0, done.stderr
    commands = [text.splitlines() for text in captured.read_text().strip().split("\n\n")]
    trainings = [words for words in commands if "torch.distributed.run" in words]
    assert len(trainings) == runs and commands[-1][0] == "examples/reproduce/convergence.py"
    seen, logs = set(), []
    for words in trainings:
        entry = next(n for n, word in enumerate(words) if word.startswith("pretrain_"))
        assert words[words.index("--nproc-per-node") + 1] == "4"
        config = parse(words[entry + 1 :], LLAMA_DEFAULTS if "llama" in words[entry] else None, 4)
        logs.append(Path(config.logging.log_jsonl).stem)
        data, optimizer = config.data, config.optimizer
        assert data.global_batch_size == 4 and config.run.train_iters == 100
        seen.add((words[entry], data.seq_length, str(data.data_path), str(config.model), optimizer.lr, config.run.seed))
    assert len(seen) == 1 and logs == commands[-1][-runs:]
