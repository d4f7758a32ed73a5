# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on chats: packed conversations have the loss of transformers for each alone, on every grid."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.chats import CHATML, make_tokenizer, write_chats
from tests.distributed.flags import A2A, FULL, GQA, LLAMA, P2, R2, SP, T2, U2, ep, fpdt
from tests.distributed.test_hugging_face_load import COMMON, LLAMA_SIZES
from tests.distributed.training_runs import (
    data_of,
    evaluated_loss,
    make_job,
    refusal_of,
    save_job,
    train_and_save,
    train_job,
)
from tests.hugging_face import loss_of, save_model
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
U2R2 = f"{U2} {R2}"


def chat_job(flags: str, llama: bool = True):
    """Like make_job, for chats."""
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


def random_model(folder: Path, kind: type = LlamaForCausalLM, std: float = 0.1, **sizes: int) -> str:
    """Save a random model of transformers with its tokenizer; returns the flags of a run that starts from them."""
    make_tokenizer(folder, "chatml", marked=False)
    torch.manual_seed(3)
    model = kind(LlamaConfig(vocab_size=len(AutoTokenizer.from_pretrained(folder)), **SIZES, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(std=std)
    model.save_pretrained(folder)
    return f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder} --split 1,0,0 --load {folder} --finetune"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags for a random model of transformers, its tokenizer and some chats; and the folder."""
    folder = tmp_path_factory.mktemp("sft")
    chats = write_chats(folder / "chats.jsonl", 30, words=5)
    return f"--data-path {chats} {random_model(folder / 'model', std=0.2)}", folder


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
        (2, ""),  # ranks with different numbers of tokens in the loss
        *also_in_full(
            (2, R2),
            (2, U2),
            (2, f"{R2} --context-parallel-balance zigzag"),
            (4, f"{R2} --micro-batch-size 2"),
            (2, P2),
            (4, f"{SP} {R2}"),
            (2, f"{R2} --fpdt --fpdt-chunk-size 32"),
            (2, "--zero-stage 3 --loss-chunks 3"),
            (1, "--loss-chunks 3"),
        ),
    ],
)
@pytest.mark.usual(1)
def test_the_grid_does_not_matter(pool, data, alone, world, grid):
    losses, grads, _, samples = alone
    for mine, my_grads, _, my_samples in pool.run(tune, world, f"{data[0]} {grid}", 3, timeout=180):
        assert mine == pytest.approx(losses, rel=1e-5) and mine[0] == pytest.approx(losses[0], rel=1e-6)
        assert my_samples == samples
        for name, grad in my_grads.items():
            assert (grad - grads[name]).abs().max() < 1e-5 * grads[name].abs().max(), name


def losses_in_float64(flags: str) -> tuple[float, float]:
    """The mean loss of some samples in float64: packed, and conversation by conversation."""
    from megatron.training.checkpoint.checkpoint import unwrap
    from megatron.training.step import shard_batch

    job = chat_job(f"{flags} --attention-kernel math --loss-chunks 2")
    model, dataset, layout = unwrap(job.model_chunks[0]).double().eval(), job.datasets[0], job.runtime.layout
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
    job = chat_job(flags)
    losses, _, _ = train_job(job, 2)
    save_job(folder, job)
    return losses


# Adapters: grid invariance of losses and gradients, unchanged base weights, checkpoints, conversion to Hugging Face.


TWO = f"{GQA} --num-layers 2"
LORA = "--lora-rank 4 --lora-alpha 6"
FPDT = fpdt(16)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 0.02 --lora-targets linear_qkv linear_proj"
LATENTS = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --qk-layernorm"
)
SENT = "--latent-exchange latents"
TARGETS = {EXPERTS: 2, LATENTS: 7, f"{LATENTS} {EXPERTS}": 5}  # layers with adapters of a layer of the model


def tune_lora(flags: str, steps: int = 3, llama: bool = True, zeros: bool = False):
    """Losses and first gradients of a run whose adapters begin with a nonzero B, unless ``zeros`` is set."""
    from megatron.training.model import weights

    def seen(name, shape, config, device):
        return torch.empty(tuple(shape)).normal_(0, 0.1, generator=weights.generator_of(name, device))

    shape = "--num-layers 2" if "latent" in flags else TWO
    with mock.patch.object(weights, "draw_adapter", weights.draw_adapter if zeros else seen):
        job = make_job(f"{shape} {LORA} --lr 1e-2 {flags}", llama)
    before = frozen(job)
    losses, _, grads = train_job(job, steps)
    assert frozen(job) == before, "the base has changed"
    return losses, grads


def frozen(job) -> float:
    parameters = [p for chunk in job.model_chunks for p in chunk.parameters() if not p.requires_grad]
    assert parameters and all(getattr(p, "main_grad", None) is None and p.grad is None for p in parameters)
    return sum(float(getattr(p, "to_local", lambda p=p: p)().double().abs().sum()) for p in parameters)


@pytest.fixture(scope="module")
def lora_alone(pool):
    cache = {}

    def reference(flags: str, llama: bool):
        if (flags, llama) not in cache:
            cache[flags, llama] = pool.run(tune_lora, 1, flags, 3, llama, timeout=120)[0]
        return cache[flags, llama]

    return reference


@pytest.mark.parametrize(
    "world, model, grid, llama",
    [
        (2, "", f"{SP}", True),
        (4, "", f"{U2} {R2} --zero-stage 1 {FULL}", True),
        (4, "", f"{T2} {P2} --micro-batch-size 1", True),
        (2, EXPERTS, f"{R2} {ep(2)} --zero-stage 3", True),
        (4, LATENTS, f"{T2} {R2} {SENT}", True),
        *also_in_full(
            (2, "", f"--zero-stage 3 {R2} --loss-chunks 3", True),
            (2, "", f"{FPDT} --fpdt-stream-hidden {U2} {FULL}", True),
            (1, "", f"{FULL} --loss-chunks 2", True),
            (2, "", T2, True),
            (2, EXPERTS, f"{U2} {ep(2)} {A2A} {FPDT}", True),
            (4, EXPERTS, f"{SP} {R2} {ep(2)} --zero-stage 1 {FULL}", True),
            (2, "", f"{SP} {FULL}", True),
            (2, "", "--zero-stage 2 --micro-batch-size 1", True),
            (4, "", f"--zero-stage 3 {SP} {U2} {FULL} --micro-batch-size 1", True),
            (4, "", f"{FPDT} {SP} {R2}", True),
            (2, "", f"{P2} --micro-batch-size 1 {FULL}", True),
            (2, "", f"--ffn-chunks 3 {R2} --recompute-granularity selective", True),
            (2, "--lora-targets linear_fc2 linear_qkv", f"{SP}", True),
            (4, "--hidden-dropout 0 --attention-dropout 0", f"{SP} {P2} --micro-batch-size 1", False),
            (4, "--group-query-attention --num-query-groups 1", f"{SP} {U2}", True),
            (2, "", f"{SP} --zero-stage 1 --overlap-grad-reduce --overlap-param-gather", True),
            (2, LATENTS, U2, True),
            (4, LATENTS, f"{SP} {R2} {SENT}", True),
            (4, LATENTS, f"{SP} {R2} {SENT} --zero-stage 3 {FULL} --micro-batch-size 1", True),
            (4, LATENTS, f"{T2} {U2} {FPDT}", True),
            (4, LATENTS, f"{R2} {P2} --micro-batch-size 1 --zero-stage 1", True),
            (4, f"{LATENTS} {EXPERTS}", f"{SP} {U2} {ep(2)}", True),
            (2, f"{LATENTS} {EXPERTS}", f"{R2} {ep(2)} {SENT}", True),
        ),
    ],
)
@pytest.mark.usual(0, 4)
def test_lora_does_not_depend_on_the_grid(pool, lora_alone, world, model, grid, llama):
    losses, grads = lora_alone(model, llama)
    seen = set()
    for mine, my_grads in pool.run(tune_lora, world, f"{model} {grid}", 3, llama, timeout=180):
        assert mine == pytest.approx(losses, rel=1e-5)
        for name, grad in my_grads.items():
            error = float((grad - grads[name]).abs().max() / grads[name].abs().max())
            assert error < 1e-5, f"gradient of {name}: {error:.1e} of its largest entry"
        seen |= set(my_grads)
    targets = TARGETS.get(model, 2 if "lora-targets" in model else 4)
    assert seen == set(grads) and len(seen) == 2 * targets * 2, "A and B of each layer, and nothing else"


def own_heads(flags: str):
    """A mistake: of the adapter of the up-projection of latents, A has the gradient of this TP rank's heads alone."""
    from megatron.context_parallel.core import lora

    def wrong(layer):
        return torch.addmm(layer.weight, layer.lora_b, layer.lora_a, alpha=layer.lora.scale)

    with mock.patch.object(lora.ColumnParallelLinearWithLora, "with_adapter", wrong):
        return tune_lora(flags)


def test_a_sum_over_heads_that_is_left_out_is_noticed(pool, lora_alone):
    _, grads = lora_alone(LATENTS, True)
    _, mine = pool.run(own_heads, 4, f"{LATENTS} {T2} {R2} {SENT}", timeout=180)[0]
    wrong = {name for name, grad in mine.items() if (grad - grads[name]).abs().max() > 1e-2 * grads[name].abs().max()}
    assert "decoder.layers.0.self_attention.linear_kv_up_proj.lora_a" in wrong


def lora_layers(sequence_parallel: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(result, by the definition) of two layers with adapters, split over a group that is not TP's."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.context_parallel import initialize_grid
    from megatron.context_parallel.core.lora import ColumnParallelLinearWithLora, Lora, RowParallelLinearWithLora
    from megatron.platform.cpu import run_core_on_cpu

    run_core_on_cpu()
    group = initialize_grid(ring=2).context.group
    config = TransformerConfig(
        num_layers=1, hidden_size=6, num_attention_heads=2, use_cpu_initialization=True, params_dtype=torch.float64,
        tensor_model_parallel_size=2, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    common = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "tp_group": group}
    lora, rank = Lora(3, 7.5, ()), group.rank()
    first = ColumnParallelLinearWithLora(6, 8, lora=lora, gather_output=False, skip_bias_add=False, **common)
    second = RowParallelLinearWithLora(8, 6, lora=lora, input_is_parallel=True, skip_bias_add=True, **common)
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    whole = {"w1": normal(8, 6), "a1": normal(3, 6), "b1": normal(8, 3)}
    whole |= {"w2": normal(6, 8), "a2": normal(3, 8), "b2": normal(6, 3), "x": normal(10, 2, 6)}
    split = {"w1": 0, "b1": 0, "w2": 1, "a2": 1} | ({"x": 0} if sequence_parallel else {})
    mine = {name: value.chunk(2, split[name])[rank] if name in split else value for name, value in whole.items()}
    parameters = [first.weight, first.lora_a, first.lora_b, second.weight, second.lora_a, second.lora_b]
    for parameter, value in zip(parameters, mine.values()):
        parameter.data.copy_(value)
    x, dout = mine["x"].clone().requires_grad_(), normal(10, 2, 6)
    out = second(torch.tanh(first(x)[0]))[0]
    grads = torch.autograd.grad(out, [*parameters, x], dout.chunk(2)[rank] if sequence_parallel else dout)
    mine = {"out": out.detach(), **dict(zip(whole, grads))}
    if sequence_parallel:  # of this rank's tokens alone; training sums them
        for name in ("a1", "b2"):
            torch.distributed.all_reduce(mine[name], group=group)
    leaves = {name: value.requires_grad_() for name, value in whole.items()}
    inner = functional.linear(leaves["x"], leaves["w1"] + 2.5 * leaves["b1"] @ leaves["a1"]).tanh()
    expected = functional.linear(inner, leaves["w2"] + 2.5 * leaves["b2"] @ leaves["a2"])
    theirs = {"out": expected, **dict(zip(leaves, torch.autograd.grad(expected, leaves.values(), dout)))}
    split |= {"out": 0} if sequence_parallel else {}
    return {
        name: (mine[name], value.detach().chunk(2, split[name])[rank] if name in split else value.detach())
        for name, value in theirs.items()
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_with_adapters_are_those_of_the_definition(pool, sequence_parallel):
    for results in pool.run(lora_layers, 2, sequence_parallel):
        for name, (mine, expected) in results.items():
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-10, msg=name)


def test_adapters_are_merged_in_fp32():
    from megatron.context_parallel.core.lora import Lora, merged

    half = [torch.randn(shape).bfloat16() for shape in ((5, 4), (3, 4), (5, 3))]
    weight, a, b = (x.double() for x in half)
    whole = merged(*half, Lora(3, 7.5, ()))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(whole.double(), weight + 2.5 * b @ a, rtol=1e-5, atol=1e-5)


def test_fresh_adapters_change_nothing(pool):
    (base,) = pool.run(go_on_alone, 1, TWO)[0]
    losses, grads = pool.run(tune_lora, 1, "", 1, True, True)[0]
    assert losses[0] == base
    assert all((not grad.any()) == name.endswith("lora_a") for name, grad in grads.items())


# ---- checkpoints, and Hugging Face


def go_on(flags: str, steps: int):
    """Losses, and one batch with the loss of this run's weights on it."""
    job = make_job(flags)
    batch = next(data_of(job))
    mean = evaluated_loss(job, iter([batch]), 1)
    return train_job(job, steps)[0], mean, batch["tokens"], batch["labels"]


@pytest.fixture(scope="module")
def tuned(pool, tmp_path_factory):
    """A random Llama of transformers, fine-tuned with adapters on TP 2; the next loss."""
    folder = tmp_path_factory.mktemp("lora")
    save_model(folder / "hf", "llama", LLAMA_SIZES)
    flags = f"{GQA} --ffn-hidden-size 96 {LORA} --lr 1e-2 {COMMON}"
    first = f"{flags} {folder / 'hf'} --finetune {SP} --zero-stage 1"
    return flags, folder, pool.run(train_and_save, 2, first, str(folder / "tuned"), 2, 1, timeout=120)[0][1]


@pytest.mark.parametrize(
    "world, grid",
    [
        *also_in_full((2, f"--zero-stage 3 {R2}")),
        *also_in_full((2, f"{P2} --micro-batch-size 1"), (2, f"--zero-stage 1 {U2}")),
    ],
)
def test_a_run_continues_from_another_grid(pool, tuned, world, grid):
    flags, folder, losses = tuned
    resumed = pool.run(go_on_alone, world, f"{flags} {folder / 'tuned'} {grid}", timeout=120)[0]
    assert resumed == pytest.approx(losses, rel=1e-5)


def go_on_alone(flags: str):
    return train_job(make_job(flags), 1)[0]


def test_weights_without_optimizer_are_read_under_fsdp(pool, tuned):
    """A base without adapters, which are new then, and a model with adapters."""
    flags, folder, _ = tuned
    losses = []
    for start in ("hf", "tuned"):
        begin = f"{flags} {folder / start} --finetune"
        losses += pool.run(go_on_alone, 1, begin, timeout=120)[0]
        sharded = pool.run(go_on_alone, 2, f"{begin} --zero-stage 2 {R2}", timeout=120)[0]
        assert sharded == pytest.approx(losses[-1:], rel=1e-5), start
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[0]


def test_merged_weights_compute_the_same(pool, tuned, tmp_path, capsys):
    from tools.convert_hf import main

    flags, folder, losses = tuned
    one, mean, tokens, labels = pool.run(go_on, 1, f"{flags} {folder / 'tuned'}", 1, timeout=120)[0]
    assert one == pytest.approx(losses, rel=1e-5)
    assert main(["--from", str(folder / "tuned"), "--to-hf", str(tmp_path / "merged")]) == 0
    assert "its adapters of rank 4 are merged into the weights" in capsys.readouterr().out
    model = LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert model.config.num_hidden_layers == LLAMA_SIZES["num_hidden_layers"]
    assert loss_of(model, tokens, labels) == pytest.approx(mean, rel=1e-6)

    assert main(["--from", str(folder / "tuned"), "--to-peft", str(tmp_path / "peft"), "--base", "some/base"]) == 0
    described = check_peft(tmp_path / "peft", model, LlamaForCausalLM.from_pretrained(folder / "hf"))
    assert described["base_model_name_or_path"] == "some/base"
    assert len(described["target_modules"]) == 7


def check_peft(folder, merged, base, prefix=("", "")):
    """Check that PEFT's file and the base are the merged weights; returns its settings.

    ``prefix``: of names in the model, and what files have in its place.
    """
    described = json.loads((folder / "adapter_config.json").read_text())
    parts, ours = load_file(folder / "adapter_model.safetensors"), dict(merged.named_parameters())
    stems = {name.removesuffix(".lora_A.weight") for name in parts if name.endswith(".lora_A.weight")}
    with torch.no_grad():
        for name, weight in base.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight').replace(*prefix, 1)}"
            if stem in stems:
                delta = parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"]
                delta *= described["lora_alpha"] / described["r"]
                assert delta.any() and (weight + delta - ours[name]).abs().max() < 1e-6, name
                assert name.split(".")[-2] in described["target_modules"]
            else:
                assert torch.equal(weight, ours[name]), name
            stems.discard(stem)
    assert not stems
    return described


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda flags: flags.replace(LORA, ""), r"has adapters: give --lora-rank 4, or merge them"),
        *also_in_full(
            (lambda flags: flags.replace("--lora-rank 4", "--lora-rank 8"), "--lora-rank 4 in the checkpoint, 8 in"),
            (lambda flags: flags.replace("--lora-alpha 6", "--lora-alpha 5"), "--lora-alpha 6 in the checkpoint, 5 in"),
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


def assert_refused(pool, flags, expected):
    import re

    message = pool.run(refusal_of, 1, flags)[0]
    assert re.search(expected, message), message


def test_weights_without_adapters_need_finetune(pool, tmp_path):
    pool.run(train_and_save, 1, TWO, str(tmp_path), 1, 0)
    assert_refused(
        pool, f"{TWO} {LORA} --load {tmp_path}", "has no adapters: to begin --lora-rank 4 .* pass --finetune"
    )
    losses, *_ = pool.run(go_on, 1, f"{TWO} {LORA} --load {tmp_path} --finetune", 1)[0]
    assert math.isfinite(losses[0])
