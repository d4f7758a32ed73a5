# SPDX-License-Identifier: Apache-2.0
"""--reward-model: packed pairs have the losses and gradients of transformers for each answer alone, on every grid."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from megatron.training.families.architectures import FAMILIES, Described, pieces
from megatron.training.families.llama.llama_weights import split
from megatron.training.settings.config import ModelConfig
from tests.chats import CHATML
from tests.distributed.flags import P2, R2, SP, T2, U2
from tests.distributed.test_preferences import as_alone, go_on, prepare_pairs, refused, row, tune
from tests.distributed.test_sft import LORA, SIZES, U2R2
from tests.pairs import also_in_full

PAIRS = 14


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Flags for a random reward model of transformers, its tokenizer and some pairs; and the folder."""
    folder, draw = tmp_path_factory.mktemp("rewards"), random.Random(2)
    rows = [row(draw, number) | ({"margin": 0.5 * number} if number % 2 else {}) for number in range(PAIRS)]
    return prepare_pairs(folder, "--reward-model", rows, LlamaForSequenceClassification, num_labels=1), folder


@pytest.fixture(scope="module")
def alone(pool, data, shared):
    """The run on one process, by its flags."""
    return lambda flags: shared(("rewards", flags), lambda: pool.run(tune, 1, f"{data[0]} {flags}", timeout=120)[0])


def tokens_of(folder: Path) -> list[list[int]]:
    """The tokens of all answers with their prompts, the chosen one of a pair first."""
    tokenizer, found = AutoTokenizer.from_pretrained(folder / "model"), []
    for pair in map(json.loads, (folder / "pairs.jsonl").read_text().splitlines()):
        for name in ("chosen", "rejected"):
            before, answer = pair.get("prompt", []), pair[name]
            before = [{"role": "user", "content": before}] if isinstance(before, str) else before
            answer = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            out = tokenizer.apply_chat_template(before + answer, chat_template=CHATML, return_dict=True)
            found.append(out["input_ids"])
    return found


def by_transformers(folder: Path, numbers: list[int]) -> tuple[float, dict[str, Tensor]]:
    """(the mean loss of some pairs, all gradients), one answer at a time."""
    rows, ids = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()], tokens_of(folder)
    model, losses = LlamaForSequenceClassification.from_pretrained(folder / "model").double(), []
    for number in numbers:
        chosen, rejected = (model(torch.tensor([ids[2 * number + at]])).logits[0, 0] for at in (0, 1))
        losses.append(F.softplus(rejected + rows[number].get("margin", 0) - chosen))
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in model.named_parameters()}


def of_ours(grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our gradients by transformers' names, in its form."""
    model = ModelConfig(
        num_layers=SIZES["num_hidden_layers"],
        hidden_size=SIZES["hidden_size"],
        ffn_hidden_size=SIZES["intermediate_size"],
        num_attention_heads=SIZES["num_attention_heads"],
        num_query_groups=SIZES["num_key_value_heads"],
        kv_channels=SIZES["hidden_size"] // SIZES["num_attention_heads"],
        untie_embeddings_and_output_weights=True,
        add_bias_linear=False,
        reward_model=True,
    )
    size, found = grads["embedding.word_embeddings.weight"].size(0), {}
    for piece in pieces(Described(model, size, FAMILIES["llama"]), ()):
        key = piece.key.replace("layers.", f"layers.{piece.layer}.")
        for ours, norm in (("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
                           ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")):  # fmt: skip
            key = key.replace(ours, norm) if key not in grads else key
        rows = grads[key].chunk(piece.parts)[piece.part]
        found |= dict(zip(piece.names, split(piece, rows, model.num_query_groups)))
    return found


def test_packed_pairs_have_the_loss_of_each_answer_alone(data, alone):
    losses, grads, samples, _ = alone("")
    assert max(map(len, samples)) > 1, "nothing is packed"
    loss, theirs = by_transformers(data[1], sum(samples, []))
    assert losses[0] == pytest.approx(loss, rel=1e-6)
    ours = of_ours(grads)
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        assert (mine - theirs[name]).abs().max() < 1e-5 * theirs[name].abs().max(), name


GRIDS = [
    (4, U2R2, ""),
    *also_in_full(
        (2, SP, ""),
        (2, R2, ""),
        (2, U2, ""),
        (2, "", ""),
        (2, T2, ""),
        (2, P2, ""),
        (4, f"{P2} {R2}", ""),
        (4, f"{P2} {SP}", ""),
        (4, f"{R2} --micro-batch-size 2", ""),
        (4, f"{SP} {R2}", ""),
        (2, f"{R2} --context-parallel-balance zigzag", ""),
        (2, f"{R2} --fpdt --fpdt-chunk-size 64", ""),
        (2, f"{U2} --fpdt --fpdt-chunk-size 64 --fpdt-stream-hidden", ""),
        (4, f"{SP} {U2} --fpdt --fpdt-chunk-size 64", ""),
        (2, "--zero-stage 1", ""),
        (2, "--zero-stage 2", ""),
        (4, f"{R2} --zero-stage 3", ""),
        (2, R2, LORA),
        (4, f"{P2} --num-virtual-stages-per-pipeline-rank 2", "--num-layers 4 --load none"),
    ),
]


@pytest.mark.parametrize("world, grid, model", GRIDS)
def test_the_grid_does_not_matter(pool, data, alone, world, grid, model):
    *_, logged = expected = alone(model)
    as_alone(pool.run(tune, world, f"{data[0]} {model} {grid}", timeout=180), expected)
    assert set(logged) == {f"reward_model_{x}" for x in ("accuracy", "margin", "chosen_reward", "rejected_reward")}


# ---- Checkpoints, transformers' form, and scores of a file.


def rewards_of(path: Path, rows: list[list[int]]) -> list[float]:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    assert model.config.num_labels == 1
    return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in rows]


@pytest.mark.lab
@pytest.mark.parametrize("world, grid", [(2, R2), (2, P2), (2, "--zero-stage 3")])
def test_a_language_model_becomes_a_reward_model_of_transformers(pool, data, tmp_path, world, grid):
    """Trained from a language model, saved, resumed, converted, scored; transformers gives the same rewards."""
    from tools.convert_hf import main as convert
    from tools.evaluate import main as evaluate

    base = LlamaForCausalLM(LlamaConfig(vocab_size=len(AutoTokenizer.from_pretrained(data[1] / "model")), **SIZES))
    base.save_pretrained(tmp_path / "base")
    flags = data[0].replace(f"--load {data[1] / 'model'} ", f"--load {tmp_path / 'base'} ") + f" {grid}"
    saved = tmp_path / "saved"
    pool.run(go_on, world, f"{flags} --save {saved}", str(saved), 1, True, timeout=180)
    whole = pool.run(go_on, world, flags, "", 2, False, timeout=180)[0]
    again = flags.replace("--finetune", "").replace(f"--load {tmp_path / 'base'}", f"--load {saved}")
    assert pool.run(go_on, world, again, "", 1, False, timeout=180)[0] == pytest.approx(whole[1:], rel=1e-6)
    causal = again.replace("--reward-model", "--dpo --dpo-reference none --finetune")
    for line in pool.run(refused, world, causal, timeout=120):
        assert "is a reward model, without logits" in line
    resumed = flags.replace("--finetune", "").replace("--load", "--pretrained-checkpoint")
    assert pool.run(go_on, world, resumed, "", 1, False, timeout=180)[0] == pytest.approx(whole[:1], rel=1e-6)

    assert convert(["--from", str(saved), "--to-hf", str(tmp_path / "hf"), "--hf-files", str(data[1] / "model")]) == 0
    assert convert(["--from", str(saved), "--to-hf", str(tmp_path / "new")]) == 0
    assert convert(["--from-hf", str(tmp_path / "hf"), "--to", str(tmp_path / "back")]) == 0
    assert convert(["--from", str(tmp_path / "back"), "--to-hf", str(tmp_path / "twice")]) == 0
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "twice"))
    assert one == two
    for source in (saved, tmp_path / "back", tmp_path / "hf"):
        out, pairs = tmp_path / f"scores of {source.name}", str(data[1] / "pairs.jsonl")
        words = f"--load {source} --eval-tasks scores --seq-length 128 --device cpu --tokenizer-type".split()
        words += ["HuggingFaceTokenizer", "--tokenizer-model", str(data[1] / "model")]
        assert pool.run(evaluate, 1, [*words, "--eval-files", pairs, "--eval-output", str(out)], timeout=180) == [0]
        rows = [json.loads(line) for line in (out / "scores.jsonl").read_text().splitlines()]
        assert len(rows) == 2 * PAIRS and [row["answer"] for row in rows[:2]] == ["chosen", "rejected"]
        ids = tokens_of(data[1])
        for folder in ("hf", "new", "twice"):
            assert rewards_of(tmp_path / folder, ids) == pytest.approx([row["reward"] for row in rows], abs=1e-6)


REFUSED = [
    ({"prompt": "a", "chosen": "b"}, "", 'line 2: the pair has no "rejected"'),
    ({"prompt": "a", "chosen": "b", "rejected": ""}, "", 'line 2: the pair has an empty "rejected"'),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}, "", "'x' is not a finite number"),
    ({"prompt": "a", "chosen": "b " * 400, "rejected": "c"}, "", "both answers must fit in --seq-length 256"),
    ({}, "--dpo", "--dpo with --reward-model"),
    ({}, "--eval-tasks needle", "only --eval-tasks scores"),
]


@pytest.mark.parametrize("bad, flags, message", REFUSED, ids=range(len(REFUSED)))
@pytest.mark.usual(2, 4)
def test_bad_input_is_refused_in_a_line(pool, data, tmp_path, bad, flags, message):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, *([bad] if bad else [])]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    line = pool.run(refused, 1, f"{data[0]} --data-path {tmp_path / 'pairs.jsonl'} {flags}")[0]
    assert message in line and "\n" not in line


@pytest.mark.lab
def test_another_tokenizer_is_refused(pool, data, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(data[1] / "model")
    tokenizer.add_tokens([f"<{number}>" for number in range(2000)])
    tokenizer.save_pretrained(tmp_path)
    flags = data[0].replace(f"--tokenizer-model {data[1] / 'model'}", f"--tokenizer-model {tmp_path}")
    line = pool.run(refused, 1, flags)[0]
    assert "use the checkpoint's tokenizer" in line and "\n" not in line
