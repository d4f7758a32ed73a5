# SPDX-License-Identifier: Apache-2.0
"""Evaluations by teacher forcing: scores are those of dense logits, of transformers, and the same on every grid."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel.core.groups import initialize_grid
from megatron.context_parallel.fpdt.log_probs import log_probs
from tests.distributed.flags import P2, R2, RUN, SHAPE, T2, U2
from tests.distributed.test_hugging_face_load import LLAMA_SIZES
from tests.distributed.training_runs import data_of, evaluated_loss, make_job, refusal_of
from tests.hugging_face import save_model
from tests.patience import patience
from tests.program import ENVIRONMENT, run_forked, run_ranks, start_forked

ROOT = Path(__file__).resolve().parents[2]

# ---- scores of tokens


def compare(tensor: int, sequence_parallel: bool, chunks: int | None, vocab: int) -> tuple[list[float], list[bool]]:
    """Largest difference of the losses, and whether the hits are those of dense logits, ties included."""
    rows, batch, hidden, width = 8, 3, 16, 12
    grid = initialize_grid(tensor=tensor)
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(rows, batch, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(width * tensor, hidden, generator=generator, dtype=torch.float64)
    weight[2] = weight[1]  # these two always have equal logits: the first is chosen
    weight[vocab - 1] = weight[0]
    logits = (states @ weight.t())[..., :vocab]
    labels = logits.argmax(-1)
    labels[::2] = torch.randint(0, vocab, labels[::2].shape, generator=generator)
    states[0] = weight[1] * 50  # each of the two equal tokens is a label
    labels[0] = torch.tensor([1, 2, 1])
    states[1] = weight[0] * 50
    labels[1] = torch.tensor([0, vocab - 1, 0])
    logits = (states @ weight.t())[..., :vocab]
    counted = torch.ones(rows, batch)
    counted[2:4] = 0
    labels[2] = -100
    best = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits.flatten(0, 1)]).view(rows, batch)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    expected = expected.view(rows, batch) * counted
    part = slice(grid.tensor.rank * rows // tensor, (grid.tensor.rank + 1) * rows // tensor)
    scores = log_probs(
        states[part] if sequence_parallel else states,
        weight[grid.tensor.rank * width : (grid.tensor.rank + 1) * width],
        labels,
        counted,
        chunks=chunks,
        vocab_size=vocab,
        greedy=True,
        tensor=grid.tensor,
        sequence_parallel=sequence_parallel,
    )
    assert scores.log_probs.shape == scores.greedy.shape == (rows, batch) and scores.entropy is None
    error = float((scores.log_probs + expected).abs().max())
    hits = scores.greedy
    return [error], [bool((hits == (best == labels) * counted).all()), bool(hits.sum() > 4)]


@pytest.mark.parametrize(
    "tensor, sequence_parallel, chunks",
    [(1, False, None), (2, False, 3), (2, True, 2), pytest.param(4, True, 100, marks=pytest.mark.full)],
)
def test_scores_are_those_of_dense_logits(pool, tensor, sequence_parallel, chunks):
    for vocab in {12 * tensor, 12 * tensor - 5}:  # padding of the vocabulary is ignored
        for errors, right in pool.run(compare, tensor, tensor, sequence_parallel, chunks, vocab):
            assert max(errors) < 1e-12 and all(right)


def test_nan_logits_give_no_hit(pool):
    assert pool.run(scores_of_nan, 1)[0] == 0


def scores_of_nan() -> float:
    states, weight = torch.full((4, 1, 8), torch.nan), torch.ones(6, 8)
    labels = torch.zeros((4, 1), dtype=torch.int64)
    return float(log_probs(states, weight, labels, vocab_size=6, greedy=True).greedy.sum())


# ---- grids

ALL = "loss-by-position needle ruler-multi-key ruler-variable-tracking ruler-common-words perplexity"
TASKS = (
    f"--num-layers 2 --seq-length 512 --eval-iters 2 --eval-tasks {ALL} --eval-lengths 256 512 --eval-depths 2 "
    "--eval-samples 1 --eval-stride 384 --init-method-std 0.3 --micro-batch-size 1"
)
PACKED = "--reset-attention-mask --reset-position-ids"
FPDT = "--fpdt --fpdt-chunk-size 128"
full = pytest.mark.full
GRIDS = [
    pytest.param(4, f"{T2} {U2} --sequence-parallel", "", id="TP 2 sp, U 2"),
    pytest.param(4, f"{P2} {R2}", "", id="PP 2, R 2 zigzag"),
    pytest.param(
        2, f"{R2} --context-parallel-balance contiguous {FPDT} --zero-stage 3", PACKED, id="R 2, FPDT", marks=full
    ),
    pytest.param(2, "", PACKED, id="DP 2"),
    pytest.param(4, f"{R2} {FPDT} --zero-stage 3", PACKED, id="R 2, DP 2, FPDT", marks=full),
    pytest.param(4, f"{U2} {R2}", PACKED, id="U 2, R 2, documents", marks=full),
    pytest.param(2, f"{P2} --num-virtual-stages-per-pipeline-rank 2", "--num-layers 4", id="PP 2 virtual", marks=full),
    pytest.param(2, f"{T2} --sequence-parallel {FPDT} --fpdt-stream-hidden", "", id="TP 2 sp, streamed", marks=full),
    pytest.param(2, "--micro-batch-size 2 --loss-chunks 5 --zero-stage 1", PACKED, id="DP 2, loss chunks", marks=full),
    pytest.param(4, f"{R2} {U2} --micro-batch-size 2 --context-parallel-balance zigzag", PACKED, id="b 2", marks=full),
    pytest.param(8, f"{T2} {R2} {P2} --sequence-parallel --bf16", "", id="all, bf16", marks=full),
]


def evaluated(flags: str, folder: str, packed: str = "") -> dict[str, Any]:
    """Results of the tasks for a fresh model."""
    from megatron.training.evaluation.tasks import Subject, evaluate_tasks

    job = make_job(f"{TASKS} --eval-files {folder}/a.txt {folder}/b.txt {packed} {flags}")
    result = evaluate_tasks(job.eval_plan, Subject(job.config, job.runtime, job.model_chunks), job.datasets[1])
    assert all(chunk.training for chunk in job.model_chunks)
    return result


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> str:
    """A text of three windows, and one shorter than a window."""
    folder = tmp_path_factory.mktemp("texts")
    numbers = [str((7 * n * n + n // 3) % 300) for n in range(1300)]
    (folder / "a.txt").write_text(" ".join(numbers))
    (folder / "b.txt").write_text("\n".join(numbers[:100]))
    return str(folder)


@pytest.fixture(scope="module")
def alone(pool, texts, shared):
    """The results on one process, with samples packed in rows, and one by one."""
    return lambda packed: shared(
        ("evaluation alone", packed), lambda: pool.run(evaluated, 1, "", texts, packed, timeout=120)[0]
    )


def numbers(result: Any) -> dict[str, float]:
    """All numbers of nested results by their path, without file names."""
    if isinstance(result, (int, float)):
        return {"": float(result)}
    items = result.items() if isinstance(result, dict) else enumerate(result) if isinstance(result, list) else ()
    return {f"{key}/{place}": value for key, inner in items for place, value in numbers(inner).items()}


@pytest.mark.parametrize("world, grid, packed", GRIDS)
@pytest.mark.usual(1)
def test_the_same_numbers_on_every_grid(pool, texts, alone, world, grid, packed):
    result = pool.run(evaluated, world, grid, texts, packed, timeout=120)
    assert all(other == result[0] for other in result)  # every rank has them
    on_grid, expected = numbers(result[0]), numbers(alone(packed))
    assert on_grid.keys() == expected.keys() and len(on_grid) > 80
    tolerance = 0.03 if "bf16" in grid else 1e-5
    for place, value in on_grid.items():
        if "bf16" in grid and place.rstrip("/").endswith(("hits", "exact", "perplexity")):
            continue
        assert value == pytest.approx(expected[place], rel=tolerance, abs=1e-7), place


def test_packed_samples_do_not_attend_to_each_other(alone):
    one, packed = alone(""), alone(PACKED)
    assert one["needle"]["samples"] == 4 and 0.1 < one["needle"]["loss"] < 100
    for task in ALL.split()[1:]:
        assert numbers(packed[task]) == pytest.approx(numbers(one[task]), rel=1e-5)


def test_sums_over_positions_are_the_validation_loss(pool, texts, alone):
    result = alone("")["loss-by-position"]
    assert [(bucket["from"], bucket["to"]) for bucket in result["buckets"]] == [(0, 127), (128, 255), (256, 511)]
    assert result["tokens"] == 2 * 4 * 512 == sum(bucket["tokens"] for bucket in result["buckets"])
    assert result["loss"] == pytest.approx(pool.run(validation_loss, 1, TASKS, texts)[0], rel=1e-6)
    inside = alone(PACKED)["loss-by-position"]["buckets"]  # documents are shorter than the sequence
    assert inside[0]["tokens"] > result["buckets"][0]["tokens"] and inside[-1]["tokens"] < 8 * 256


def validation_loss(flags: str, folder: str) -> float:
    job = make_job(f"{flags} --eval-files {folder}/a.txt")
    return evaluated_loss(job, data_of(job, 1), iterations=job.config.run.eval_iters)


# ---- transformers' own numbers


def from_hugging_face(folder: str, text: str) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Results of a Hugging Face folder, and what loss-by-position reads."""
    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint.arguments_of import shape_of
    from megatron.training.data.batches import micro_batches
    from megatron.training.evaluation.evaluated_model import prepare_evaluation
    from megatron.training.evaluation.tasks import Subject, evaluate_tasks
    from megatron.training.setup import start
    from tools.evaluate import DEFAULTS

    flags = (
        f"--load {folder} --seq-length 512 --mock-data --tokenizer-type NullTokenizer --vocab-size 300 --eval-iters 3 "
        f"--eval-tasks loss-by-position perplexity --eval-files {text} --device cpu --make-vocab-size-divisible-by 1 "
        f"{U2 if dist.get_world_size() > 1 else ''}"
    )
    config = parse(flags.split(), DEFAULTS, dist.get_world_size(), shape_of)
    runtime = start(config)
    plan, chunks, dataset = prepare_evaluation(config, runtime)
    batches = micro_batches(dataset, consumed_samples=0, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1)
    read = [(batch["tokens"], batch["labels"]) for batch, _ in zip(batches, range(3))]
    return evaluate_tasks(plan, Subject(config, runtime, chunks), dataset), read


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "llama", LLAMA_SIZES)


def test_loss_by_position_is_that_of_transformers(pool, llama, texts):
    from transformers import AutoModelForCausalLM

    result, read = pool.run(from_hugging_face, 2, str(llama), f"{texts}/a.txt")[0]
    model = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    tokens, labels = (torch.cat(parts) for parts in zip(*read))
    text = torch.tensor([int(word) for word in (Path(texts) / "a.txt").read_text().split()])
    with torch.no_grad():
        logits = model(tokens).logits.double()
        pieces = [text[start : start + 513] for start in (0, 512, 1024)]
        losses_of_text = torch.cat(
            [
                torch.nn.functional.cross_entropy(model(part[None, :-1]).logits[0].double(), part[1:], reduction="none")
                for part in pieces
            ]
        )
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    hits = (logits.argmax(-1) == labels).double()
    for bucket in result["loss-by-position"]["buckets"]:
        part = slice(bucket["from"], bucket["to"] + 1)
        assert bucket["loss"] == pytest.approx(float(losses[:, part].mean()), rel=1e-5)
        assert bucket["hits"] == pytest.approx(float(hits[:, part].mean()), abs=1e-9)
    (file,) = result["perplexity"]["files"]
    assert file["tokens"] == len(losses_of_text) == 1299
    assert file["loss"] == pytest.approx(float(losses_of_text.mean()), rel=1e-5)
    assert file["perplexity"] == pytest.approx(math.exp(float(losses_of_text.mean())), rel=1e-4)


# ---- programs


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=full)])
def test_the_program_writes_tables_json_and_pictures(llama, tmp_path, ranks):
    flags = (
        f"--load {llama} --seq-length 256 --tokenizer-type NullTokenizer --vocab-size 300 --eval-tasks needle "
        f"ruler-multi-key --eval-depths 3 --eval-samples 1 --eval-lengths 128 256 --device cpu "
        f"--make-vocab-size-divisible-by 1 {PACKED} --ring-parallel-size {ranks} --eval-output {tmp_path}/out"
    )
    first, *others = run_ranks(ROOT / "tools" / "evaluate.py", flags.split(), ENVIRONMENT, ranks)
    assert first.returncode == 0 and not any(other.returncode or other.stdout for other in others), first.stderr
    assert "needle: answer tokens right" in first.stdout and "ruler-multi-key" in first.stdout
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert result["checkpoint"] == str(llama) and f"Ring {ranks}" in result["grid"]
    assert [(cell["length"], cell["depth"]) for cell in result["tasks"]["needle"]["cells"]] == [
        (length, depth) for length in (128, 256) for depth in (0.0, 0.5, 1.0)
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"evaluation.json", "needle.png", "ruler.png"}


RESULTS = {  # program, flags, files that it writes
    "evaluate": (
        "--seq-length 64 --eval-tasks loss-by-position perplexity --eval-files {text} --eval-iters 1 --mock-data "
        "--make-vocab-size-divisible-by 1 --eval-output {out}",
        {"evaluation.json", "loss-by-position.png"},
    ),
    "generate": ("--prompts {text} --max-new-tokens 3 --output {out}/answers.jsonl", {"answers.jsonl"}),
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("program", RESULTS)
@pytest.mark.lab
def test_of_two_jobs_with_one_output_each_is_complete_or_refused(llama, tmp_path, program):
    """In one line, and the results are those of one job. RACES=1 tries 50 random delays of each."""
    flags, names = RESULTS[program]
    (text := tmp_path / "text.txt").write_text("3 4 5 6 7 8 9\n")
    flags += f" --load {llama} --tokenizer-type NullTokenizer --vocab-size 300 --device cpu"
    draw, refused, expected = random.Random(program), 0, None
    races = 50 if os.environ.get("RACES") else 1
    for number in range(races):
        out = tmp_path / f"{number}"
        words = flags.format(text=text, out=out).split()
        jobs = []
        for at in ("first", "second"):
            jobs.append(start_forked(ROOT / "tools" / f"{program}.py", words, ENVIRONMENT, tmp_path / f"{at}{number}"))
            time.sleep(draw.uniform(0, 0.5) if number else 0)
        for job, at in zip(jobs, ("first", "second")):
            job.join(patience(100))
            error = (tmp_path / f"{at}{number}" / "err").read_text()
            assert job.exitcode in (0, 2) and "Traceback" not in error, error
            refused += job.exitcode == 2
            assert job.exitcode == 0 or "is in use by process" in error.strip().splitlines()[-1]
        assert 0 in [job.exitcode for job in jobs] and {path.name for path in out.iterdir()} == names
        content = {path.name: path.read_text() for path in out.iterdir() if path.suffix != ".png"}
        content = {name: re.sub(r'"(seconds|[a-z_]*_per_second)": [^,}]*', "", text) for name, text in content.items()}
        assert content == (expected := expected or content)
        assert sorted(path.name for path in tmp_path.iterdir() if ".owner" in path.name or ".tmp" in path.name) == []
    print(f"{program}: {races} races, {refused} refused")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--load {hf}", "missing: --eval-tasks"),
        ("--eval-tasks needle --load {tmp}", "--load {tmp} holds no checkpoint"),
        ("--eval-tasks needle --load {hf} --save {tmp}", "--save: an evaluation saves no checkpoint"),
    ],
)
def test_what_the_program_refuses(pool, llama, tmp_path, flags, message):
    flags, message = (text.format(tmp=tmp_path, hf=llama) for text in (flags, message))
    assert message in pool.run(refusal_of, 1, flags, make=prepared)[0]


def test_a_checkpoint_is_needed(capsys):
    from tools import evaluate

    assert evaluate.main(["--eval-tasks", "needle"]) == 2
    assert capsys.readouterr().err == (
        "error: missing: --load DIR, the checkpoint or the Hugging Face folder to evaluate\n"
    )


NEEDS = "loss-by-position {}needs data, which neither a flag nor the checkpoint gives: --valid-data-path PREFIX, or "


def test_a_task_without_data_is_left_out():
    from tools.evaluate import without_data

    words = "--load x --eval-tasks needle loss-by-position --eval-samples 3".split()
    assert without_data(words, {}) == (
        "--load x --eval-tasks needle --eval-samples 3".split(), [f"{NEEDS.format('is left out: it ')}--mock-data"]
    )  # fmt: skip
    for more, taken in ((["--mock-data"], {}), (["--valid-data-path=y"], {}), ([], {"data.mock_data": True})):
        assert without_data([*words, *more], taken) == ([*words, *more], [])


def test_a_task_without_data_alone_is_refused(llama, capsys):
    from tools import evaluate

    assert evaluate.main(["--load", str(llama), "--eval-tasks", "loss-by-position"]) == 2
    assert capsys.readouterr().err == f"error: --eval-tasks {NEEDS.format('')}--mock-data\n"


def prepared(flags: str, _: bool) -> None:
    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint.arguments_of import shape_of
    from megatron.training.evaluation.evaluated_model import prepare_evaluation
    from megatron.training.setup import start
    from tools.evaluate import DEFAULTS

    config = parse(f"{SHAPE} {RUN} {flags}".split(), DEFAULTS, 1, shape_of)
    prepare_evaluation(config, start(config))


@pytest.mark.lab
def test_training_logs_its_tasks(tmp_path):
    flags = (
        f"{SHAPE} {RUN} --seq-length 512 --max-position-embeddings 512 --train-iters 2 --eval-interval 1 "
        "--eval-iters 1 --eval-tasks needle loss-by-position --eval-depths 2 --eval-samples 1 --log-interval 1 "
        f"--log-jsonl {tmp_path}/log.jsonl --tensorboard-dir {tmp_path}/board --eval-output {tmp_path}/out"
    )
    done = run_forked(ROOT / "pretrain_llama.py", flags.split(), ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("needle: answer tokens right") == 2
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for row in rows:
        assert {"needle_hits", "needle_exact", "needle_loss", "needle_512_hits", "validation_loss"} <= row.keys()
        assert row["loss_by_position_0_127"] > 0 and "loss_by_position_256_511" in row
    assert rows[0]["needle_loss"] != rows[1]["needle_loss"]
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["iteration"] == 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert "needle_hits" in board.Tags()["scalars"]


def test_held_out_data_are_needed(pool, tmp_path):
    from tools import make_needles

    flags = ["--length", "65", "--documents", "20", "--tokenizer-type", "NullTokenizer", "--vocab-size", "301"]
    assert make_needles.main(["--output-prefix", str(tmp_path / "train"), *flags]) == 0
    flags = f"{SHAPE} {RUN} --eval-iters 1 --eval-tasks loss-by-position --train-iters 1 {P2}"
    flags = f"{flags.replace('--mock-data', '')} --train-data-path {tmp_path}/train_text_document"
    for message in pool.run(refusal_of, 2, flags, make=prepared_training):
        assert "needs validation data, and there are none" in message


def prepared_training(flags: str, _: bool) -> None:
    from megatron.training.arguments.parser import parse
    from megatron.training.job import prepare
    from megatron.training.setup import start

    config = parse(flags.split(), None, dist.get_world_size())
    prepare(config, start(config))
