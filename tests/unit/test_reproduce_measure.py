# SPDX-License-Identifier: Apache-2.0
"""--measure of the papers' tables: real runs in place of the cost model, and the text of rows without a time."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from examples.reproduce import measured
from examples.reproduce.fpdt import tables as fpdt_tables
from examples.reproduce.fpdt import training as fpdt
from examples.reproduce.genslm import tables as genslm
from examples.reproduce.measured import Measured, Unmeasured, launch, reason, run_flags, step_seconds
from examples.reproduce.report import Row, command, published, run_tables, write
from examples.reproduce.simulate import Clock, shape_of, usp_tflops
from examples.reproduce.ulysses import tables as ulysses
from examples.reproduce.usp import tables as usp
from megatron.formulas.strategy import Strategy, Workload
from megatron.training.arguments.parser import parse
from megatron.training.settings.models import LLAMA
from tests.program import run_forked

REPRODUCE = Path(measured.__file__).parent
PAPERS = {"usp": usp.TABLES, "ulysses": ulysses.TABLES, "fpdt": fpdt_tables.TABLES, "genslm": genslm.TABLES}
MEASURED = {  # others are refused with a reason before anything else
    *(f"usp/{name}" for name in ("table_5", "table_6", "table_7", "figure_5")),
    *(f"ulysses/{name}" for name in ("table_2", "table_3", *(f"figure_{number}" for number in range(3, 8)))),
    *(f"fpdt/{name}" for name in ("figure_1", "figure_11", "figure_12", "table_3_mfu")),
    "genslm/table_1",
}
COMMANDS = [f"{paper}/{name}" for paper, result in PAPERS.items() for name in result]
TABLES: list[Callable[[Clock], list[Row]]] = [
    usp.training_rows, usp.figure_5_rows, ulysses.scaling_rows, ulysses.figure_3_rows, ulysses.figure_7_rows,
    lambda clock: [row for figure in (4, 5, 6) for row in ulysses.figure_rows(clock, figure)],
    fpdt.figure_1_rows, fpdt.figure_11_rows, fpdt.figure_12_rows, fpdt.table_3_rows, genslm.throughput_rows,
]  # fmt: skip
TINY = Workload(shape_of("gpt-2.7b", num_layers=1, hidden_size=64, num_attention_heads=4), 128)
ABSENT = {"the paper's block-sparse kernel is not available", "the old framework is not available"}


def of_gpus(count: int) -> Measured:
    clock = Measured(count)
    vars(clock)["peak"] = 312e12  # as if it had been looked up
    return clock


@pytest.mark.lab
def test_a_step_of_a_real_run(monkeypatch):
    """Two processes on a CPU, forked as the launcher would start them."""

    def forked(command: list[str], environment: dict[str, str], limit: float) -> tuple[int, str]:
        place = next(n for n, word in enumerate(command) if word.endswith(".py"))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}

        def rank(number: int) -> subprocess.CompletedProcess:
            mine = environment | job | {"RANK": str(number), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"}
            return run_forked(Path(command[place]), command[place + 1 :], mine, timeout=200)

        with ThreadPoolExecutor(2) as both:
            done = list(both.map(rank, range(2)))
        return max(run.returncode for run in done), "".join(run.stdout + run.stderr for run in done)

    monkeypatch.setattr(measured, "launch", forked)
    assert 1e-3 < step_seconds("gpt-2.7b", TINY, Strategy(ulysses=2), device="cpu") < 60


def test_the_time_is_the_median_after_the_first_two_steps(monkeypatch):
    assert step_of(monkeypatch, [9000, 5000, 100, 300]) == pytest.approx(0.2)
    with pytest.raises(Unmeasured, match="failed with code 0"):  # a log that is too short
        step_of(monkeypatch, [9000, 5000, 100])


def step_of(monkeypatch, milliseconds: list[int]) -> float:
    def run(command: list[str], environment: dict[str, str], limit: float) -> tuple[int, str]:
        assert command[command.index("--nproc-per-node") + 1] == "4" and environment["PYTHONPATH"]
        rows = "".join(f'{{"iteration_ms": {value}}}\n' for value in milliseconds)
        Path(command[command.index("--log-jsonl") + 1]).write_text(rows)
        return 0, ""

    monkeypatch.setattr(measured, "launch", run)
    return step_seconds("gpt-2.7b", TINY, Strategy(ulysses=4))


@pytest.mark.parametrize(
    "output, message",
    [
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20 GiB\nerror: rank 1 ended", "OOM"),
        ("[rank0]: RuntimeError: CUDA error: out of memory", "OOM"),
        ("Root Cause: exitcode : -9 (pid: 7)\ntraceback : Signal 9 (SIGKILL)", "killed, as if host memory had run out"),
        ("a warning\nerror: --seq-length 100 cannot be cut\nraise ChildFailedError(", "--seq-length 100 cannot be cut"),
        ("error on rank 3: --zero-stage 9 is unknown", "--zero-stage 9 is unknown"),
        ("Traceback\n[rank0]: ValueError: no such kernel\n  error_file: <N/A>", "ValueError: no such kernel"),
        ("", "failed with code 1"),
    ],
)
def test_why_a_run_gave_no_time(monkeypatch, output: str, message: str):
    assert reason(1, output) == message
    monkeypatch.setattr(measured, "launch", lambda *_: (1, output))
    assert of_gpus(8).seconds("gpt-2.7b", TINY, Strategy(ulysses=4)) == message


def test_a_run_that_takes_too_long_is_ended(tmp_path):
    file = tmp_path / "pid"
    code = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    with pytest.raises(Unmeasured, match="not done in 1 s"):
        launch([sys.executable, "-S", "-c", code], dict(os.environ), 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: getattr(table, "__name__", "figure_rows"))
def test_every_row_is_a_run_that_the_program_takes(monkeypatch, table):
    def accepted(name: str, workload: Workload, strategy: Strategy) -> float:
        program, *flags = run_flags(name, workload, strategy)
        llama = {f"model.{name}": value for name, value in LLAMA.items()}
        config = parse(flags, llama if program.endswith("pretrain_llama.py") else None, strategy.ranks)
        model = config.model
        assert model.num_layers == workload.shape.layers and config.optimizer.bf16
        assert model.num_attention_heads == workload.shape.heads
        assert model.ffn_hidden_size in (None, workload.shape.ffn)
        assert config.data.global_batch_size == workload.global_batch
        assert (config.attention.attention_mask == "full") is not workload.causal
        return 2.0

    monkeypatch.setattr(measured, "step_seconds", accepted)
    rows = table(of_gpus(256))
    assert rows and all(row.marked == "measured" for row in rows)
    assert {row.ours for row in rows if isinstance(row.ours, str)} <= ABSENT


def test_measured_seconds_are_converted_like_simulated_ones(monkeypatch):
    monkeypatch.setattr(measured, "step_seconds", lambda *_: 2.0)
    line = next(line for line in published("usp_tables_5_6_7") if line["table"] == 5)
    workload = Workload(shape_of(line["model"]), line["seq_length"], line["global_batch"])
    row = usp.training_rows(of_gpus(8), (5,))[0]
    assert row.ours == round(usp_tflops(workload, 2.0, 8), 1) and row.error is not None


def test_layer_inputs_are_in_host_memory_where_the_paper_keeps_them(monkeypatch):
    result = []

    def run(model: str, workload: Workload, strategy: Strategy) -> float:
        result.append(strategy.offload_checkpoints)
        return 1.0

    monkeypatch.setattr(measured, "step_seconds", run)
    fpdt.table_3_rows(of_gpus(8))
    assert result == [line["checkpoint_offload"] == "yes" for line in published("fpdt_table_3_strategies")]


def test_rows_without_a_time_are_kept_with_the_reason(monkeypatch, tmp_path, capsys):
    """On 8 GPUs, rows of table 6 with 16 GPUs have no result; OOM agrees where the paper's run was OOM too."""

    def full(*_) -> float:
        raise Unmeasured("OOM")

    monkeypatch.setattr(measured, "step_seconds", full)
    rows = usp.training_rows(of_gpus(8), (6,))
    assert {row.ours for row in rows} == {"needs 16 GPUs"} and all(row.marked == "measured" for row in rows)
    figure = usp.figure_5_rows(of_gpus(8))
    assert {row.ours for row in figure} == {"OOM"}
    dense = ulysses.figure_rows(of_gpus(64), 4)
    assert any(row.agrees for row in dense if row.published == "OOM")
    write(tmp_path, "table_6", "USP, table 6", rows, panel="seq_length")
    write(tmp_path, "figure_3", "a figure", ulysses.figure_3_rows(of_gpus(0)), over="gpus")
    message = capsys.readouterr().out
    assert "needs 16 GPUs" in message and "ours: measured" in message


def test_a_shape_that_flags_cannot_say_is_an_error():
    other = replace(TINY, shape=replace(TINY.shape, ffn=1000))
    with pytest.raises(ValueError, match="is not the shape that the row is about"):
        run_flags("gpt-2.7b", other, Strategy())


@pytest.mark.parametrize("name", COMMANDS)
def test_without_gpus_measure_is_refused(name: str, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    out = tmp_path / "out"
    paper, table = name.split("/")
    file = REPRODUCE / paper / "tables.py"
    with pytest.raises(SystemExit) as ended:
        run_tables(str(file), "", PAPERS[paper], [table, str(out), "--measure"])
    message = capsys.readouterr()
    assert ended.value.code == 2 and not out.exists() and not message.out
    assert message.err.startswith("error: --measure") and message.err.count("\n") == 1 and "leave" in message.err
    assert (not PAPERS[paper][table].not_measured) == (name in MEASURED)


def test_other_commands_have_no_measure(capsys):
    with pytest.raises(SystemExit):
        command(str(REPRODUCE / "fpdt" / "figure_13.py"), "").parse_args(["--measure"])
    assert "unrecognized arguments: --measure" in capsys.readouterr().err
