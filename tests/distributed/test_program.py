# SPDX-License-Identifier: Apache-2.0
"""The program as a whole: log, evaluation, SIGTERM, resume, divergence, a full disk."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.pairs import also_in_full
from tests.patience import patience
from tests.program import ENVIRONMENT, meeting, run_forked, run_ranks, start_forked

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --lr-decay-style constant --num-workers 0 --device cpu "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --log-interval 1"
)
FIELDS = {
    "iteration",
    "lm_loss",
    "grad_norm",
    "tokens",
    "iteration_ms",
    "data_wait_ms",
    "tokens_per_second",
    "model_tflops_per_device",
    "mfu",
    "mfu_full_mask_with_recompute",
    "device_peak_bytes",
    "host_peak_bytes",
}


PROGRAM = ROOT / "pretrain_llama.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def start(flags: str, *launcher: str) -> subprocess.Popen:
    """Start the program like a user; its imports take seconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [*launcher, str(PROGRAM), *FLAGS.split(), *flags.split()]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=patience(120))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def alone(flags: str) -> tuple[int, str, str]:
    """A run on one process, from the start to the end."""
    done = run_forked(PROGRAM, f"{FLAGS} {flags}".split(), ENVIRONMENT)
    return done.returncode, done.stdout, done.stderr


def together(flags: str) -> list[subprocess.CompletedProcess]:
    """A run on two processes."""
    return run_ranks(PROGRAM, f"{FLAGS} {flags}".split(), ENVIRONMENT, 2)


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def stopped_by_sigterm(folder: Path, flags: str) -> tuple[str, str]:
    """Standard output and errors of a run on 2 processes that SIGTERM stopped."""
    with meeting(ENVIRONMENT, 2) as environments:
        ranks = [
            start_forked(PROGRAM, f"{FLAGS} {flags}".split(), one, folder / f"rank{number}")
            for number, one in enumerate(environments)
        ]
        log, end = folder / "rank0" / "out", time.monotonic() + patience(120)
        while not (log.exists() and "iteration        5/" in log.read_text()):
            assert time.monotonic() < end and all(rank.is_alive() for rank in ranks)
            time.sleep(0.02)
        for rank in ranks:  # torchrun passes its signal on in the same way
            rank.terminate()
        for rank in ranks:
            rank.join(patience(60))
            rank.kill()
    return log.read_text(), "".join((folder / f"rank{number}" / "err").read_text() for number in range(2))


def stopped_by_sigterm_to_torchrun(folder: Path, flags: str) -> tuple[str, str]:
    """The same, but torchrun starts the processes and gets the signal."""
    process = start(flags, *TORCHRUN)
    seen = ""
    watch = threading.Timer(patience(120), os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    for line in process.stdout:
        seen += line
        if "iteration        5/" in line:
            break
    watch.cancel()
    os.killpg(process.pid, signal.SIGTERM)
    _, out, err = finish(process)
    return seen + out, err


@pytest.mark.parametrize("stopped", [stopped_by_sigterm, *also_in_full(stopped_by_sigterm_to_torchrun)])
def test_sigterm_saves_and_stops_and_a_resumed_run_appends_to_the_log(tmp_path, stopped):
    folder = tmp_path
    flags = (
        f"--ring-parallel-size 2 --train-iters 400 --eval-iters 1 --eval-interval 100 --log-throughput "
        f"--log-params-norm --log-num-zeros-in-grad --log-progress --tensorboard-dir {folder}/tensorboard "
        f"--log-jsonl {folder}/log.jsonl --save {folder}/checkpoints --load {folder}/checkpoints "
        "--async-save --save-interval 2"
    )
    out, err = stopped(folder, flags)
    assert "stopped after iteration" in out and "SIGTERM" in out, out + err
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert saved == len(rows(folder / "log.jsonl")) >= 5
    assert f"iteration {saved}" in (folder / "checkpoints" / "progress.txt").read_text()

    before = rows(folder / "log.jsonl")
    with open(folder / "log.jsonl", "a") as file:
        file.write('{"iteration": 7, "lm_l')  # torn by a kill
    last = before[-1]["iteration"] + 3
    done = together(f"{flags} --exit-interval {last}")
    out, err = done[0].stdout, "".join(one.stderr for one in done)
    assert [one.returncode for one in done] == [0, 0], out + err
    assert f"going on after iteration {before[-1]['iteration']}" in out
    after = rows(folder / "log.jsonl")
    assert after[: len(before)] == before
    assert [row["iteration"] for row in after] == list(range(1, last + 1))
    for row in after:
        assert set(row) >= FIELDS
        assert row["tokens"] == 128 and row["device_peak_bytes"] > 100_000
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["iteration_ms"] * 1000)
        assert row["mfu_full_mask_with_recompute"] > row["mfu"] > 0
    assert list((folder / "tensorboard").iterdir())
    assert "MFU" in out and "params norm" in out and "num zeros" in out and "time left" in out


@pytest.mark.lab
def test_two_lengths_in_one_run(tmp_path):
    """A stage ends with an evaluation and a checkpoint; the log says which stage a step is of."""
    flags = f"--train-iters 3 --eval-iters 1 --eval-interval 10 --log-jsonl {tmp_path}/log.jsonl"
    words = f"{FLAGS} {flags} --save {tmp_path}/c --load {tmp_path}/c".replace("--seq-length 64", "").split()
    schedule = "0:32 2:64 --fpdt --fpdt-chunk-size 32 --global-batch-size 4"
    done = run_forked(PROGRAM, [*words, "--seq-length-schedule", schedule], ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stage 1 of 2: iterations 1 to 2, 32 tokens" in done.stdout and "iterations 3 to 3, 64 tokens" in done.stdout
    assert done.stdout.count("validation loss at iteration") == 2
    found = [(row["stage"], row["seq_length"], row["tokens"]) for row in rows(tmp_path / "log.jsonl")]
    assert found == [(1, 32, 64), (1, 32, 64), (2, 64, 256)]
    assert {path.name for path in (tmp_path / "c").glob("iter_*")} == {"iter_0000002", "iter_0000003"}


def test_divergence_ends_with_a_line_and_saves_no_checkpoint(tmp_path):
    code, out, err = alone(f"--train-iters 30 --eval-iters 0 --lr 1e30 --clip-grad 0 --save {tmp_path}/c")
    assert code != 0
    assert "and nothing was saved: lower --lr" in out
    assert "Traceback" not in out
    (kept,) = (tmp_path / "c").iterdir()
    assert kept.name == "bad_batches" and len(list(kept.iterdir())) == 2 and f"the batch: written to {kept}" in out


def test_the_profiler_writes_a_trace_of_each_rank_with_the_phases(tmp_path):
    window = "--profile-step-start 1 --profile-step-end 3 --profile-ranks 0 1"
    flags = f"--ring-parallel-size 2 --train-iters 4 --eval-iters 0 --profile --use-pytorch-profiler {window} "
    flags += "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"
    for done in together(f"{flags} --tensorboard-dir {tmp_path}"):
        assert done.returncode == 0, done.stderr
    traces = {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in tmp_path.glob("*.json.gz")}
    assert set(traces) == {f"rank-{rank}.iteration-2.pt.trace.json.gz" for rank in (0, 1)}
    for trace in traces.values():
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        assert [names.count(phase) for phase in ("forward", "backward", "optimizer")] == [4, 4, 2]  # two steps
        assert any("gloo" in event["name"] or "c10d" in event["name"] for event in trace["traceEvents"])
        assert trace["record_shapes"] and trace["with_stack"]


def test_evaluation_alone(tmp_path):
    flags = f"--train-iters 2 --eval-iters 2 --save {tmp_path}/c --log-jsonl {tmp_path}/log.jsonl"
    code, out, err = alone(flags)
    assert code == 0, err
    row = rows(tmp_path / "log.jsonl")[-1]
    code, out, err = alone(f"--skip-train --eval-iters 2 --eval-interval 1 --load {tmp_path}/c --finetune")
    assert code == 0, err
    assert f"{row['validation_loss']:.6E}" in out and f"{row['test_loss']:.6E}" in out
    assert "iteration        1/" not in out


LIMITED = f"""
import os, resource, runpy, sys

pipe = os.open(sys.argv.pop(1), os.O_WRONLY)  # printed output goes to a pipe, which has no limit
for number in (1, 2):
    os.dup2(pipe, number)
sys.stdout, sys.stderr = (os.fdopen(os.dup(pipe), "w", buffering=1) for _ in range(2))
resource.setrlimit(resource.RLIMIT_FSIZE, (3072, 3072))
sys.argv[0] = {str(PROGRAM)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.lab
def test_a_disk_that_fills_up_does_not_end_the_run(tmp_path):
    script, pipe = tmp_path / "limited.py", tmp_path / "pipe"
    script.write_text(LIMITED)
    os.mkfifo(pipe)
    flags = f"--train-iters 20 --eval-iters 0 --save {tmp_path}/c --save-interval 4 --log-jsonl {tmp_path}/log.jsonl"
    flags += f" --profile --use-pytorch-profiler --profile-step-end 12 --tensorboard-dir {tmp_path}/traces"
    with ThreadPoolExecutor(1) as reader:
        read = reader.submit(pipe.read_text)  # until all writers have ended
        with open(pipe, "w"):  # otherwise the reader waits forever if the program ends early
            done = run_forked(script, [str(pipe), *FLAGS.split(), *flags.split()], ENVIRONMENT)
        code, out, err = done.returncode, read.result(), done.stdout + done.stderr
    assert "iteration       20/      20" in out, out + err
    assert "WARNING: --log-jsonl" in out and "WARNING: --profile" in out and "no checkpoint was written" in out
    assert code != 0  # the last checkpoint could not be saved
    assert not list((tmp_path / "c").glob("iter_*"))
    assert not list((tmp_path / "traces").glob("*trace*"))


def test_a_log_that_cannot_be_written_is_refused_on_all_ranks(tmp_path):
    done = together(f"--train-iters 2 --ring-parallel-size 2 --log-jsonl {tmp_path}")
    assert all(one.returncode == 2 for one in done), done
    refusals = [line for one in done for line in one.stderr.splitlines() if "error: --log-jsonl" in line]
    assert len(refusals) == 1, done
    assert not any("iteration        1/" in one.stdout for one in done)
