# SPDX-License-Identifier: Apache-2.0
"""Adapters: grid invariance of losses and gradients, the base as it was, checkpoints, and the way to Hugging Face."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from megatron.training.refusal import Refusal
from tests.distributed.test_hugging_face_load import COMMON, LLAMA_SIZES
from tests.distributed.training_runs import make_job, train_job
from tests.hugging_face import save_model
from tests.pairs import also_in_full

GQA = "--group-query-attention --num-query-groups 2 --num-layers 2"
LORA = "--lora-rank 4 --lora-alpha 6"
T2, SP, P2 = "--tensor-model-parallel-size 2", "--sequence-parallel", "--pipeline-model-parallel-size 2"
R2, U2 = "--ring-parallel-size 2", "--ulysses-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FPDT = "--fpdt --fpdt-chunk-size 16"


def tune(flags: str, steps: int = 3, llama: bool = True, zeros: bool = False):
    """Losses and first gradients of a run whose adapters begin with a B that shows, unless with ``zeros``."""
    from megatron.training.model import weights

    def seen(name, shape, config, device):
        return torch.empty(tuple(shape)).normal_(0, 0.1, generator=weights.generator_of(name, device))

    with mock.patch.object(weights, "draw_adapter", weights.draw_adapter if zeros else seen):
        job = make_job(f"{GQA} {LORA} --lr 1e-2 {flags}", llama)
    before = frozen(job)
    losses, _, grads = train_job(job, steps)
    assert frozen(job) == before, "the base has changed"
    return losses, grads


def frozen(job) -> float:
    parameters = [p for chunk in job.chunks for p in chunk.parameters() if not p.requires_grad]
    assert parameters and all(getattr(p, "main_grad", None) is None and p.grad is None for p in parameters)
    return sum(float(getattr(p, "to_local", lambda p=p: p)().double().abs().sum()) for p in parameters)


@pytest.fixture(scope="module")
def alone(pool):
    cache = {}

    def reference(flags: str, llama: bool):
        if (flags, llama) not in cache:
            cache[flags, llama] = pool.run(tune, 1, flags, 3, llama, timeout=120)[0]
        return cache[flags, llama]

    return reference


@pytest.mark.parametrize(
    "world, model, grid, llama",
    [
        (2, "", f"{T2} {SP}", True),
        (4, "", f"{U2} {R2} --zero-stage 1 {FULL}", True),
        (4, "", f"{T2} {P2} --micro-batch-size 1", True),
        *also_in_full(
            (2, "", f"--zero-stage 3 {R2} --loss-chunks 3", True),
            (2, "", f"{FPDT} --fpdt-stream-hidden {U2} {FULL}", True),
            (1, "", f"{FULL} --loss-chunks 2", True),
            (2, "", T2, True),
            (2, "", f"{T2} {SP} {FULL}", True),
            (2, "", "--zero-stage 2 --micro-batch-size 1", True),
            (4, "", f"--zero-stage 3 {T2} {SP} {U2} {FULL} --micro-batch-size 1", True),
            (4, "", f"{FPDT} {T2} {SP} {R2}", True),
            (2, "", f"{P2} --micro-batch-size 1 {FULL}", True),
            (2, "", f"--ffn-chunks 3 {R2} --recompute-granularity selective", True),
            (2, "--lora-targets linear_fc2 linear_qkv", f"{T2} {SP}", True),
            (4, "--hidden-dropout 0 --attention-dropout 0", f"{T2} {SP} {P2} --micro-batch-size 1", False),
            (4, "--group-query-attention --num-query-groups 1", f"{T2} {SP} {U2}", True),
            (2, "", f"{T2} {SP} --zero-stage 1 --overlap-grad-reduce --overlap-param-gather", True),
        ),
    ],
)
def test_the_grid_does_not_matter(pool, alone, world, model, grid, llama):
    losses, grads = alone(model, llama)
    seen = set()
    for mine, my_grads in pool.run(tune, world, f"{model} {grid}", 3, llama, timeout=180):
        assert mine == pytest.approx(losses, rel=1e-5)
        for name, grad in my_grads.items():
            error = float((grad - grads[name]).abs().max() / grads[name].abs().max())
            assert error < 1e-5, f"gradient of {name}: {error:.1e} of its largest entry"
        seen |= set(my_grads)
    targets = 2 if "lora-targets" in model else 4
    assert seen == set(grads) and len(seen) == 2 * targets * 2, "A and B of each layer, and nothing else"


def base_loss(flags: str) -> float:
    return train_job(make_job(flags), 1)[0][0]


def test_fresh_adapters_change_nothing(pool):
    base = pool.run(base_loss, 1, GQA)[0]
    losses, grads = pool.run(tune, 1, "", 1, True, True)[0]
    assert losses[0] == base
    assert all((not grad.any()) == name.endswith("lora_a") for name, grad in grads.items())


# ---- checkpoints, and Hugging Face


def tune_folder(flags: str, folder: str, steps: int):
    """Train, save, and go on for a step; the losses."""
    from megatron.training.checkpoint import checkpoint

    job = make_job(flags)
    losses, _, _ = train_job(job, steps)
    checkpoint.save(folder, job.progress, job.chunks, job.optimizer, job.schedule, job.config)
    return losses + train_job(job, 1)[0]


def go_on(flags: str, steps: int):
    """Losses, and one batch with the loss of this run's weights on it."""
    from megatron.training.job import batches_for
    from megatron.training.step import evaluate

    job = make_job(flags)
    batch = next(iter(batches_for(job, job.datasets[0], 0, 0)))
    mean = evaluate(job.runtime, job.chunks, iter([batch]), job.config, 1, 1).lm_loss
    losses, _, _ = train_job(job, steps)
    return losses, mean, batch["tokens"], batch["labels"]


@pytest.fixture(scope="module")
def tuned(pool, tmp_path_factory):
    """A random Llama of transformers, fine-tuned with adapters on TP 2; its losses."""
    folder = tmp_path_factory.mktemp("lora")
    save_model(folder / "hf", "llama", LLAMA_SIZES)
    flags = f"--group-query-attention --num-query-groups 2 --ffn-hidden-size 96 {LORA} --lr 1e-2 {COMMON}"
    losses = pool.run(
        tune_folder,
        2,
        f"{flags} {folder / 'hf'} --finetune {T2} {SP} --zero-stage 1",
        str(folder / "tuned"),
        2,
        timeout=120,
    )[0]
    return flags, folder, losses


@pytest.mark.parametrize(
    "world, grid",
    [
        (2, f"--zero-stage 3 {R2}"),
        *also_in_full((2, f"{P2} --micro-batch-size 1"), (2, f"--zero-stage 1 {U2}")),
    ],
)
def test_a_run_goes_on_from_another_grid(pool, tuned, world, grid):
    flags, folder, losses = tuned
    resumed = pool.run(go_on_alone, world, f"{flags} {folder / 'tuned'} {grid}", timeout=120)[0]
    assert resumed == pytest.approx(losses[2:], rel=1e-5)


def go_on_alone(flags: str):
    return train_job(make_job(flags), 1)[0]


def test_merged_weights_compute_the_same(pool, tuned, tmp_path):
    from tools.convert_hf import main

    flags, folder, losses = tuned
    one, mean, tokens, labels = pool.run(go_on, 1, f"{flags} {folder / 'tuned'}", 1, timeout=120)[0]
    assert one == pytest.approx(losses[2:], rel=1e-5)
    assert main(["--from", str(folder / "tuned"), "--to-hf", str(tmp_path / "merged")]) == 0
    model = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.num_hidden_layers == LLAMA_SIZES["num_hidden_layers"]
    with torch.no_grad():
        logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert float(loss) == pytest.approx(mean, rel=1e-6)

    assert main(["--from", str(folder / "tuned"), "--to-peft", str(tmp_path / "peft"), "--base", "some/base"]) == 0
    described = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "some/base" and described["r"] == 4
    parts = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert len(parts) == 2 * 7 * LLAMA_SIZES["num_hidden_layers"]
    base = LlamaForCausalLM.from_pretrained(folder / "hf")
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in base.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in parts:
                delta = parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"] * described["lora_alpha"] / 4
                assert delta.any() and (weight + delta - ours[name]).abs().max() < 1e-6, name
            else:
                assert torch.equal(weight, ours[name]), name


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda flags: flags.replace(LORA, ""), r"has adapters: give --lora-rank 4, or merge them"),
        *also_in_full(
            (lambda flags: flags.replace("--lora-rank 4", "--lora-rank 8"), "--lora-rank 4 there, 8 here"),
            (lambda flags: flags.replace("--lora-alpha 6", "--lora-alpha 5"), "--lora-alpha 6 there, 5 here"),
            (
                lambda flags: flags.replace(LORA, f"{LORA} --lora-targets linear_qkv"),
                "--lora-targets linear_qkv linear_pr",
            ),
        ),
    ],
)
def test_other_adapters_are_refused(pool, tuned, change, expected):
    flags, folder, _ = tuned
    assert_refused(pool, f"{change(flags)} {folder / 'tuned'}", expected)


def refusal_of(flags: str) -> str:
    try:
        make_job(flags)
    except Refusal as refusal:
        return str(refusal)
    return ""


def assert_refused(pool, flags, expected):
    import re

    told = pool.run(refusal_of, 1, flags)[0]
    assert re.search(expected, told), told


def test_weights_without_adapters_need_finetune(pool, tmp_path):
    pool.run(tune_folder, 1, GQA, str(tmp_path), 1)
    assert_refused(
        pool, f"{GQA} {LORA} --load {tmp_path}", "has no adapters: to begin --lora-rank 4 .* pass --finetune"
    )
    losses, *_ = pool.run(go_on, 1, f"{GQA} {LORA} --load {tmp_path} --finetune", 1)[0]
    assert math.isfinite(losses[0])
