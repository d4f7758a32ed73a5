# SPDX-License-Identifier: Apache-2.0
"""--dpo: losses and gradients of packed pairs are those of transformers for each answer alone, on every grid."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaForCausalLM

from tests.chats import CHATML, sentence
from tests.distributed.flags import LLAMA, P2, R2, SP, T2, U2
from tests.distributed.test_sft import BASE, LENGTH, LORA, U2R2, chat_job, random_model
from tests.distributed.training_runs import compare_gradients, refusal_of, save_job, train_job
from tests.pairs import also_in_full

PAIRS, BATCH = 14, 4


def row(draw: random.Random, number: int) -> dict[str, Any]:
    """A row in each of the forms that are read."""
    question, good, bad = (sentence(draw, draw.randint(1, 5)) for _ in range(3))
    if number % 3 == 0:
        return {"prompt": question, "chosen": good, "rejected": bad}
    before = [{"role": "user", "content": question}]
    if number % 3 == 1:  # two turns, of which the last one is the answer
        before += [{"role": "assistant", "content": sentence(draw, 2)}, {"role": "user", "content": "Why?"}]
    answers = [[{"role": "assistant", "content": text}] for text in (good, bad)]
    if number % 2:
        return {"prompt": before, "chosen": answers[0], "rejected": answers[1]}
    return {"chosen": before + answers[0], "rejected": before + answers[1]}


def prepare_pairs(folder: Path, flags: str, rows: list[dict], kind: type = LlamaForCausalLM, **sizes: int) -> str:
    """Write a random model and the rows; returns the flags of a run with them."""
    pairs = folder / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(one) + "\n" for one in rows))
    start = random_model(folder / "model", kind, **sizes)
    return f"{flags} --seq-length {2 * LENGTH} --max-position-embeddings {2 * LENGTH} --data-path {pairs} {start}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags for a random model of transformers, its tokenizer and some pairs; and the folder."""
    folder, draw = tmp_path_factory.mktemp("dpo"), random.Random(2)
    return prepare_pairs(folder, "--dpo", [row(draw, number) for number in range(PAIRS)]), folder


def tune(flags: str, steps: int = 3) -> tuple[list[float], dict[str, Tensor], list[list[int]], dict[str, float]]:
    """Losses, gradients of the first step, the pairs of each of its samples, and what the last step logs."""
    from megatron.training import step

    results, right = [], step.result_of
    with mock.patch.object(step, "result_of", lambda *given: results.append(right(*given)) or results[-1]):
        job = chat_job(flags)
        losses, _, grads = train_job(job, steps)
    return losses, grads, [held.tolist() for held in job.datasets[0].samples[:BATCH]], results[-1][2]


@pytest.fixture(scope="module")
def alone(pool, data, shared):
    """The run on one process, by its flags."""
    return lambda flags: shared(("dpo", flags), lambda: pool.run(tune, 1, f"{data[0]} {flags}", timeout=120)[0])


def answers_of(folder: Path, numbers: list[int]) -> list[list[tuple[Tensor, Tensor]]]:
    """(token ids, which belong to the answer) of both answers of some pairs, from transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    pairs = []
    for number in numbers:
        pairs.append([])
        for name in ("chosen", "rejected"):
            before, answer = rows[number].get("prompt", []), rows[number][name]
            before = [{"role": "user", "content": before}] if isinstance(before, str) else before
            answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            out = tokenizer.apply_chat_template(
                before + answer, chat_template=CHATML, return_assistant_tokens_mask=True, return_dict=True
            )
            ids, spoken = torch.tensor(out["input_ids"]), torch.tensor(out["assistant_masks"])
            prompt = tokenizer.apply_chat_template(before + answer[:-1], chat_template=CHATML, return_dict=True)
            pairs[-1].append((ids, spoken * (torch.arange(len(ids)) >= len(prompt["input_ids"]))))
    return pairs


# Each loss of a pair, written down again, from (sum of log-probabilities, tokens) of both answers.
def sigmoid(c: Tensor, r: Tensor, n: int, m: int, beta: float) -> Tensor:
    ahead = c - r - (c - r).detach()  # the reference has the same weights
    return F.softplus(-beta * ahead)


def hinge(c: Tensor, r: Tensor, n: int, m: int, beta: float) -> Tensor:
    return (1 - beta * (c - r - (c - r).detach())).clamp(min=0)


def ipo(c: Tensor, r: Tensor, n: int, m: int, beta: float) -> Tensor:
    return (c / n - c.detach() / n - r / m + r.detach() / m - 0.5 / beta) ** 2


def simpo(c: Tensor, r: Tensor, n: int, m: int, beta: float) -> Tensor:
    return F.softplus(-(beta * (c / n - r / m) - 0.3))


def orpo(c: Tensor, r: Tensor, n: int, m: int, beta: float) -> Tensor:
    odds = [(x / k).exp() / (1 - (x / k).exp()) for x, k in ((c, n), (r, m))]
    return -c / n + beta * F.softplus(-(odds[0] / odds[1]).log())


def free(c: Tensor, r: Tensor, n: int, m: int, beta: float) -> Tensor:
    return 0.9 * F.softplus(-beta * (c - r)) + 0.1 * F.softplus(beta * (c - r))


KINDS = {
    sigmoid: "",
    free: "--dpo-reference none --dpo-label-smoothing 0.1",
    **{kind: f"--dpo-loss {kind.__name__}" for kind in (hinge, ipo, orpo)},
    simpo: "--dpo-loss simpo --dpo-margin 0.3",
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.usual(0, 4)
def test_packed_pairs_have_the_loss_of_each_answer_alone(data, alone, kind):
    """transformers' model and template, one answer at a time; gradients of the first and the last weight."""
    losses, grads, samples, _ = alone(f"{KINDS[kind]} --dpo-beta 0.3")
    model = LlamaForCausalLM.from_pretrained(data[1] / "model").double()
    assert max(map(len, samples)) > 1, "nothing is packed"
    values = []
    for pair in answers_of(data[1], sum(samples, [])):
        sums = []
        for ids, mine in pair:
            every = model(ids[None]).logits[0, :-1].log_softmax(-1)
            sums.append((every.gather(1, ids[1:, None])[:, 0] * mine[1:]).sum())
        values.append(kind(*sums, *(int(mine[1:].sum()) for _, mine in pair), 0.3))
    loss = torch.stack(values).mean()
    loss.backward()
    assert losses[0] == pytest.approx(float(loss), rel=1e-6)
    for name, theirs in (("output_layer", model.lm_head), ("embedding.word_embeddings", model.model.embed_tokens)):
        theirs = theirs.weight.grad
        assert (grads[f"{name}.weight"] - theirs).abs().max() < 1e-5 * theirs.abs().max(), name


def as_alone(results: list[tuple], expected: tuple) -> None:
    """Assert that what :func:`tune` returns of each rank is what it returns on one process."""
    losses, grads, samples, logged = expected
    for mine, _, my_samples, my_logged in results:
        assert mine == pytest.approx(losses, rel=1e-5, abs=1e-7) and my_samples == samples
        assert my_logged == pytest.approx(logged, rel=1e-4, abs=1e-6)
    compare_gradients([mine for _, mine, *_ in results], grads, 1e-5, smallest=1e-7)


GRIDS = [
    (4, U2R2, ""),
    (2, SP, ""),
    *also_in_full(
        (2, R2, ""),
        (2, U2, ""),
        (2, "", ""),
        (2, T2, "--dpo-loss ipo"),
        (2, P2, ""),
        (4, f"{P2} {R2}", "--dpo-loss orpo"),
        (4, f"{R2} --micro-batch-size 2", ""),
        (2, f"{R2} --context-parallel-balance zigzag", "--dpo-loss simpo"),
        (4, f"{SP} {R2}", ""),
        (2, f"{R2} --fpdt --fpdt-chunk-size 64", ""),
        (2, f"{U2} --fpdt --fpdt-chunk-size 64 --fpdt-stream-hidden", ""),
        (2, "--zero-stage 1", ""),
        (2, "--zero-stage 2", ""),
        (4, f"{R2} --zero-stage 3", ""),
        (2, R2, LORA),
        (4, f"{SP} {U2} --zero-stage 1", LORA),
        (4, f"{P2} --num-virtual-stages-per-pipeline-rank 2", "--num-layers 4 --load none --dpo-loss hinge"),
    ),
]


@pytest.mark.parametrize("world, grid, model", GRIDS)
@pytest.mark.usual(0)
def test_the_grid_does_not_matter(pool, data, alone, world, grid, model):
    losses, *_ = expected = alone(model)
    as_alone(pool.run(tune, world, f"{data[0]} {model} {grid}", timeout=180), expected)
    if not model:
        assert losses[0] == pytest.approx(0.6931472, rel=1e-6) and losses[2] < losses[0]


DELTA = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq [1,0] --linear-num-key-heads 2 "
    "--linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 12 --init-method-std 0.1"
)
MAMBA = (
    "--is-hybrid-model --mamba-num-heads 8 --mamba-head-dim 12 --mamba-state-dim 6 --mamba-num-groups 4 "
    "--mamba-dt-min 0.01 --num-layers 4 --hybrid-override-pattern MM*- --init-method-std 0.1"
)
MOE = "--num-experts 4 --moe-ffn-hidden-size 48 --init-method-std 0.1"
TREES = [
    (4, f"{DELTA} --dpo-reference none", U2R2),
    (2, "--window-size 11,0 --init-method-std 0.1", R2),
    *also_in_full(
        (4, "", f"{U2R2} --context-parallel-balance documents"),
        (2, f"{DELTA} --dpo-reference none", f"{R2} --fpdt --fpdt-chunk-size 256"),
        (2, MAMBA, U2),
        (4, MOE, f"{U2R2} --expert-model-parallel-size 2"),
        (2, "--position-embedding-type learned_absolute", f"{R2} --fpdt --fpdt-chunk-size 256"),
        (4, "--reset-position-ids", f"{SP} {R2}"),
    ),
]


def whole_epoch(flags: str) -> tuple[list[float], dict[str, Tensor], list[int], str]:
    """Losses, gradients, each pair's shared tokens and the notes, of samples that hold all pairs."""
    job = chat_job(f"{flags} --seq-length 2048 --max-position-embeddings 2048 --global-batch-size 1")
    losses, _, grads = train_job(job, 2)
    assert {len(held) for held in job.datasets[0].samples} == {PAIRS}
    return losses, grads, job.datasets[0].conversations.shared.tolist(), "; ".join(job.config.notes)


@pytest.mark.parametrize("world, model, grid", TREES)
@pytest.mark.usual(0)
def test_a_shared_prompt_is_computed_once(pool, data, world, model, grid):
    flags = f"{data[0]} --load none {model}"
    losses, grads, shared, _ = pool.run(whole_epoch, 1, f"{flags} --separate-prompts", timeout=120)[0]
    results = pool.run(whole_epoch, world, f"{flags} {grid}", timeout=180)
    for mine, _, own, notes in results:
        assert not any(shared) and sum(own) > 100 and "prompts are shared, so that" in notes
        assert mine == pytest.approx(losses, rel=1e-5, abs=1e-7)
    rounding = 0.0
    if "delta" in model:  # gates add up what cancels: what separate rows differ by on this grid is rounding
        for _, own, *_ in pool.run(whole_epoch, world, f"{flags} {grid} --separate-prompts", timeout=180):
            rounding = max(rounding, worst_error(own, grads))
    compare_gradients([mine for _, mine, *_ in results], grads, max(1e-5, 2 * rounding), smallest=1e-7)


def worst_error(mine: dict[str, Tensor], grads: dict[str, Tensor]) -> float:
    return max(
        float((x - grads[name]).abs().max() / grads[name].abs().max().clamp(min=1e-7)) for name, x in mine.items()
    )


def simulated(flags: str) -> tuple[int, float]:
    """Bytes of weights on a rank of two, and FLOPs of its step, without a process for each rank."""
    from megatron.simulator.dry_run.one_rank import run_rank
    from megatron.training.arguments.parser import parse

    config = parse(f"{BASE} {flags} {R2} --load none --dry-run --world-size 2".split(), LLAMA, 2)
    step = run_rank(config, 2, 0, 100)
    return step.peaks["backward"]["parameters"], step.trace.flops()


def test_a_dry_run_knows_the_reference(data):
    """Its weights, and a forward pass of three with a backward pass."""
    alone, copy = (simulated(f"{data[0]} --dpo-reference {kind}") for kind in ("none", "copy"))
    assert copy[0] == 2 * alone[0]
    assert 1.25 < copy[1] / alone[1] < 1.4


def go_on(flags: str, folder: str, steps: int, save: bool) -> list[float]:
    job = chat_job(flags)
    losses = train_job(job, steps)[0]
    if save:
        save_job(folder, job)
    return losses


@pytest.mark.parametrize("grid", [R2, *also_in_full("--zero-stage 3", P2)])
def test_a_run_that_continues_has_the_same_reference(pool, data, tmp_path, grid):
    """The weights of the start are then those of --pretrained-checkpoint; without it the run is refused."""
    model = str(data[1] / "model")
    flags = data[0].replace(f"--load {model} --finetune", f"--pretrained-checkpoint {model}") + f" {grid}"
    whole = pool.run(go_on, 2, flags, "", 4, False, timeout=180)[0]
    pool.run(go_on, 2, f"{flags} --save {tmp_path}", str(tmp_path), 2, True, timeout=180)
    assert pool.run(go_on, 2, f"{flags} --load {tmp_path}", "", 2, False, timeout=180)[0] == pytest.approx(whole[2:])
    alone = flags.replace(f"--pretrained-checkpoint {model}", "")
    for line in pool.run(refused, 2, f"{alone} --load {tmp_path}", timeout=180):
        assert "name the weights of the start" in line


@pytest.mark.lab
def test_parquet(pool, data, tmp_path):
    """The same pairs as columns of lists and texts; each answer has the form of most files: a list of messages."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow
    from pyarrow import parquet

    rows = [json.loads(line) for line in (data[1] / "pairs.jsonl").read_text().splitlines()]
    rows = [one for one in rows if isinstance(one.get("prompt"), list)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    results = [pool.run(tune, 1, f"{data[0]} --data-path {tmp_path / name}", 2, timeout=120)[0]
               for name in ("pairs.jsonl", "pairs.parquet")]  # fmt: skip
    assert results[0][0] == results[1][0] and results[0][2] == results[1][2]


# ---- Mistakes, and rows that are refused.


def mistaken(flags: str, what: str) -> float:
    from megatron.training import loss
    from megatron.training.data import chat_dataset

    if what == "a sum by rank":
        with mock.patch.object(loss, "dist", mock.Mock()):
            return tune(flags, 1)[1]["output_layer.weight"]
    with mock.patch.object(chat_dataset, "last_turns", lambda spoken, _: spoken):  # turns of the prompt count
        return tune(f"{flags} --data-cache-path {what}", 1)[1]["output_layer.weight"]


@pytest.mark.parametrize("what", ["a sum by rank", "a prompt let in"])
def test_mistakes_are_seen(pool, data, alone, tmp_path, what):
    world, grid = (2, R2) if what == "a sum by rank" else (1, KINDS[simpo])  # the prompt cancels in DPO's own loss
    grads = alone("" if world == 2 else grid)[1]["output_layer.weight"]
    what = what if world == 2 else str(tmp_path)
    wrong = pool.run(mistaken, world, f"{data[0]} {grid}", what, timeout=120)[0]
    assert (wrong - grads).abs().max() > 1e-3 * grads.abs().max()


def refused(flags: str) -> str:
    return refusal_of(flags, make=chat_job)


ANSWER = {"role": "assistant", "content": "yes"}
BAD = [
    ({"prompt": "a", "chosen": "b"}, 'line 2: the pair has no "rejected"'),
    ({"prompt": "a", "chosen": "", "rejected": "b"}, 'line 2: the pair has an empty "chosen"'),
    ({"chosen": "b", "rejected": "c"}, 'line 2, "chosen" is a text, but the row has no "prompt"'),
    ({"prompt": "a", "chosen": 3, "rejected": "c"}, '"chosen" is neither a text nor a list of messages'),
    ({"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"}, "roles out of order"),
    ({"prompt": [ANSWER], "chosen": [ANSWER], "rejected": [ANSWER]}, "assistant comes first"),
    ({"prompt": "a", "chosen": "b " * 400, "rejected": "c"}, "both answers must fit in --seq-length 256"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=range(len(BAD)))
@pytest.mark.usual(0, 1, 6)
def test_bad_rows_are_refused_by_line(pool, data, tmp_path, bad, message):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, bad]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    line = pool.run(refused, 1, f"{data[0]} --data-path {tmp_path / 'pairs.jsonl'}")[0]
    assert message in line and "\n" not in line


FLAGS = [
    ("--dpo-loss orpo --dpo-reference copy", "--dpo-reference copy with --dpo-loss orpo"),
    ("--dpo-reference adapters-off", "needs adapters"),
    ("--dpo-beta 0", "--dpo-beta 0"),
    ("--dpo-loss ipo --dpo-label-smoothing 0.1", "--dpo-label-smoothing with --dpo-loss ipo"),
    ("--sft-over-length truncate", "--dpo with --sft-over-length truncate"),
    ("--mtp-num-layers 1", "--dpo with --mtp-num-layers"),
]


@pytest.mark.parametrize("flags, message", FLAGS)
@pytest.mark.usual(0)
def test_flags_that_do_not_go_together(pool, data, flags, message):
    assert message in pool.run(refused, 1, f"{data[0]} {flags}")[0]
