# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on chats: packed conversations have the loss that transformers gives each alone, on every grid."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.chats import CHATML, make_tokenizer, write_chats
from tests.distributed.training_runs import LLAMA, train_job
from tests.pairs import also_in_full

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
LENGTH, SAMPLES = 128, 4
BASE = (
    f"--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --seq-length {LENGTH} --micro-batch-size 1 --global-batch-size {SAMPLES} --train-iters 4 "
    "--lr 1e-3 --eval-iters 0 --num-workers 0 --device cpu --make-vocab-size-divisible-by 1 --no-progress --sft"
)
R2, U2, U2R2 = "--ring-parallel-size 2", "--ulysses-parallel-size 2", "--ulysses-parallel-size 2 --ring-parallel-size 2"


def chat_job(flags: str):
    """As make_job, of chats."""
    from megatron.training.arguments.parser import parse
    from megatron.training.job import prepare
    from megatron.training.setup import start

    config = parse(f"{BASE} {flags}".split(), LLAMA, torch.distributed.get_world_size())
    return prepare(config, start(config))


def tune(flags: str, steps: int):
    """Losses, gradients of the first step, notes, and the conversations of each sample of it."""
    job = chat_job(flags)
    losses, _, grads = train_job(job, steps)
    return losses, grads, job.config.notes, [held.tolist() for held in job.datasets[0].samples[:SAMPLES]]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags for a random model of transformers, its tokenizer and some chats; and the folder."""
    folder = tmp_path_factory.mktemp("sft")
    make_tokenizer(folder / "model", "chatml", marked=False)
    chats = write_chats(folder / "chats.jsonl", 30, words=5)
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(AutoTokenizer.from_pretrained(folder / "model")), **SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=0.2)
    model.save_pretrained(folder / "model")
    flags = (
        f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder / 'model'} --split 1,0,0 "
        f"--data-path {chats} --load {folder / 'model'} --finetune"
    )
    return flags, folder


@pytest.fixture(scope="module")
def alone(pool, data):
    return pool.run(tune, 1, data[0], 3, timeout=120)[0]


def test_packed_loss_is_that_of_each_conversation_alone(data, alone):
    """transformers' model and template, a conversation at a time; the gradient of the output layer as well."""
    losses, grads, notes, samples = alone
    model, folder = LlamaForCausalLM.from_pretrained(data[1] / "model"), data[1]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    lines = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    assert max(map(len, samples)) > 1, "nothing is packed"
    total, count = torch.zeros((), dtype=torch.float64), 0
    for index in np.concatenate([np.array(sample) for sample in samples]).tolist():
        out = tokenizer.apply_chat_template(
            lines[index], chat_template=CHATML, return_assistant_tokens_mask=True, return_dict=True
        )
        ids, spoken = torch.tensor(out["input_ids"]), torch.tensor(out["assistant_masks"])
        logits = model(ids[None]).logits[0, :-1]
        each = functional.cross_entropy(logits, ids[1:], reduction="none")
        total = total + (each * spoken[1:]).sum().double()
        count += int(spoken[1:].sum())
    loss = total / count
    assert losses[0] == pytest.approx(float(loss), rel=1e-6)
    loss.backward()
    theirs = model.lm_head.weight.grad
    assert (grads["output_layer.weight"] - theirs).abs().max() < 1e-5 * theirs.abs().max()
    theirs = model.model.embed_tokens.weight.grad
    assert (grads["embedding.word_embeddings.weight"] - theirs).abs().max() < 1e-5 * theirs.abs().max()
    assert any("30 conversations" in note for note in notes)


@pytest.mark.parametrize(
    "world, grid",
    [
        (4, U2R2),
        (2, ""),  # ranks with different numbers of words that count
        *also_in_full(
            (2, R2),
            (2, U2),
            (2, f"{R2} --context-parallel-balance zigzag"),
            (4, f"{R2} --micro-batch-size 2"),
            (2, "--pipeline-model-parallel-size 2"),
            (4, f"--tensor-model-parallel-size 2 --sequence-parallel {R2}"),
            (2, f"{R2} --fpdt --fpdt-chunk-size 32"),
            (2, "--zero-stage 3 --loss-chunks 3"),
            (1, "--loss-chunks 3"),
        ),
    ],
)
def test_the_grid_does_not_matter(pool, data, alone, world, grid):
    losses, grads, _, samples = alone
    for mine, my_grads, _, my_samples in pool.run(tune, world, f"{data[0]} {grid}", 3, timeout=180):
        assert mine == pytest.approx(losses, rel=1e-5) and mine[0] == pytest.approx(losses[0], rel=1e-6)
        assert my_samples == samples
        for name, grad in my_grads.items():
            assert (grad - grads[name]).abs().max() < 1e-5 * grads[name].abs().max(), name


def losses_in_float64(flags: str) -> tuple[float, float]:
    """The mean loss of some samples in float64: as they are, and of their conversations one by one."""
    from megatron.training.checkpoint.checkpoint import unwrap
    from megatron.training.step import shard_batch

    job = chat_job(f"{flags} --attention-kernel math --loss-chunks 2")
    model, dataset, layout = unwrap(job.chunks[0]).double().eval(), job.datasets[0], job.runtime.layout
    model.config.params_dtype = torch.float64

    def loss(tokens, labels, mask, ends):
        batch = {"tokens": tokens[None], "labels": labels[None], "loss_mask": mask[None], "document_ends": ends[None]}
        batch = shard_batch(batch, layout, "cpu", reset_positions=True)
        mask = batch["loss_mask"].double()
        with torch.no_grad():
            return float(
                model(
                    batch["tokens"],
                    batch["position_ids"],
                    batch["document_ends"],
                    labels=batch["labels"],
                    loss_mask=mask,
                )
            )

    packed = single = count = 0.0
    for number in range(SAMPLES):
        sample, start = dataset[number], 0
        packed += loss(*sample.values())
        count += float(sample["loss_mask"].sum())
        for stop in sample["document_ends"].tolist():
            part = {name: torch.zeros_like(sample[name]) for name in ("tokens", "labels", "loss_mask")}
            for name, row in part.items():
                row[: stop - start] = sample[name][start:stop]
            single += loss(*part.values(), torch.tensor([stop - start, LENGTH]))
            start = stop
    return packed / count, single / count


def test_packed_loss_in_float64(pool, data):
    packed, single = pool.run(losses_in_float64, 1, data[0], timeout=120)[0]
    assert packed == pytest.approx(single, rel=1e-12)


def test_a_run_that_is_resumed_takes_the_next_conversations(pool, data, alone, tmp_path):
    def flags(load):
        return data[0].partition("--load")[0] + load

    save = pool.run(tune_and_save, 1, data[0], str(tmp_path), timeout=120)[0]
    resumed = pool.run(tune, 2, f"{flags(f'--load {tmp_path}')} {R2}", 1, timeout=120)[0][0]
    assert [*save, *resumed] == pytest.approx(alone[0], rel=1e-5)


def tune_and_save(flags: str, folder: str):
    from megatron.training.checkpoint import checkpoint

    job = chat_job(flags)
    losses, _, _ = train_job(job, 2)
    checkpoint.save(folder, job.progress, job.chunks, job.optimizer, job.schedule, job.config)
    return losses
