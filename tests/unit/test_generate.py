# SPDX-License-Identifier: Apache-2.0
"""Generation without a model: placement of keys, sampling of tokens, reading of prompts, refusals."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.context_parallel.attention.ulysses import head_plan
from megatron.context_parallel.layout.grid import Grid, abstract_grid
from megatron.context_parallel.layout.masks import Causal
from megatron.context_parallel.layout.sequence_layout import SequenceLayout, length_unit
from megatron.context_parallel.layout.spans import count, positions
from megatron.formulas.strategy import Shape
from megatron.inference.generate import Sampling, allowed_logits, choose
from megatron.inference.kv_cache import CachePlan
from megatron.inference.load import check_length, check_mask, configure
from megatron.inference.prompts import read_prompts
from megatron.training.arguments.parser import parse
from megatron.training.data.tokenizer import Tokenizer, build_tokenizer
from megatron.training.refusal import Refusal
from megatron.training.settings.attention_settings import MASKS, MaskKind
from megatron.training.settings.config import Config, DataConfig, ModelConfig
from tests.program import run_forked
from tests.properties import examples

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
NULL = "--tokenizer-type NullTokenizer --vocab-size 99"


@examples(60)
@given(
    ring=st.integers(1, 5),
    ulysses=st.integers(1, 3),
    balance=st.sampled_from(["zigzag", "contiguous"]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    decoded=st.integers(0, 200),
)
def test_every_token_is_kept_by_one_ring_rank(ring, ulysses, balance, lengths, decoded):
    grid, unit = abstract_grid(ring=ring, ulysses=ulysses), length_unit(ulysses, ring, balance)
    layout = SequenceLayout(-(-max(lengths) // unit) * unit, grid, balance)
    plan = CachePlan(layout, tuple(sorted(lengths)), decoded)
    for length in plan.lengths:
        held = [plan.spans(length, decoded, rank) for rank in range(ring)]
        everything = sorted(at for spans in held if spans for at in positions(spans, CPU).tolist())
        assert everything == list(range(length + decoded))
        for rank, spans in enumerate(held):
            assert count(spans) <= plan.rows(rank)
            assert count(spans) == count(plan.prompt_spans(length, rank)) + plan.kept(decoded, rank)
    for step in range(decoded):
        rank, place = plan.home(step)
        assert place == plan.kept(step, rank) and plan.kept(step + 1, rank) == place + 1
        row = count(plan.prompt_spans(plan.lengths[0], rank)) + place
        assert positions(plan.spans(plan.lengths[0], step + 1, rank), CPU)[row] == plan.lengths[0] + step
    kept_by = [plan.kept(decoded, rank) for rank in range(ring)]
    assert max(kept_by) - min(kept_by) <= 16


def test_after_many_decoded_tokens_a_step_is_one_tile_per_prompt():
    plan = CachePlan(SequenceLayout(64, abstract_grid(ring=2)), (50, 64), 200)
    ((samples, tiles), (others, _)) = plan.step_tiles(199, 0, Causal())
    assert (samples, others) == (slice(0, 1), slice(1, 2))
    assert [(tile.k, tile.kind) for tile in tiles] == [((0, plan.rows(0) - 14), "full")]  # 50 tokens, not 64


def test_bytes_of_the_cache_by_hand():
    shape = Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, gated=True)
    sizes = {"prompt": 131072, "new_tokens": 1, "itemsize": 2}
    assert cache_bytes(shape, abstract_grid(), **sizes) == 2 * 32 * 131072 * 8 * 128 * 2
    assert cache_bytes(shape, abstract_grid(ulysses=8, ring=4), **sizes) == 2 * 32 * 32768 * 1 * 128 * 2
    assert cache_bytes(shape, abstract_grid(ulysses=16, ring=2), **sizes) == 2 * 32 * 65536 * 1 * 128 * 2  # replicated


def logits() -> torch.Tensor:
    return torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.7, 0, 1.0), (1.0, 7, 1.0), (1.3, 0, 0.8), (0.9, 20, 0.5)])
def test_temperature_top_k_and_top_p_as_transformers(temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    expected = TemperatureLogitsWarper(temperature)(None, logits())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    result = allowed_logits(logits(), Sampling(False, temperature, top_k, top_p))
    assert torch.equal(result, expected) and (top_k == 0 or result.isfinite().sum() <= 3 * top_k)


def test_draws_follow_the_distribution_and_depend_only_on_seed_prompt_and_place():
    sampling, scores = Sampling(greedy=False, seed=1), torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = torch.bincount(torch.cat([choose(scores, sampling, (0,), place) for place in range(4000)]), minlength=4)
    assert (counts / 4000 - scores.softmax(-1)[0]).abs().max() < 0.03
    both = choose(logits(), sampling, (4, 5, 6), 9)
    assert choose(logits()[1:], sampling, (5, 6), 9).tolist() == both[1:].tolist()
    many = [choose(logits(), Sampling(False, seed=seed), (4, 5, 6), 9).tolist() for seed in range(4)]
    assert len({tuple(row) for row in many}) > 1
    assert choose(logits(), Sampling(), (0, 1, 2), 0).tolist() == logits().argmax(-1).tolist()


def null() -> Tokenizer:
    return build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 99)


def test_prompts_of_each_kind(tmp_path):
    assert [prompt.tokens for prompt in read_prompts(["1 2", "3"], None, null(), 100)] == [(1, 2), (3,)]
    lines = tmp_path / "prompts.txt"
    lines.write_text("5 6\n7\n")
    assert [prompt.tokens for prompt in read_prompts([], lines, null(), 100)] == [(5, 6), (7,)]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "5 6", "id": 3}\n\n{"tokens": [8, 99]}\n{"text": "1"}\n')
    result = read_prompts([], rows, null(), 100)
    assert [(prompt.text, prompt.tokens) for prompt in result] == [("5 6", (5, 6)), (None, (8, 99)), ("1", (1,))]
    assert result[1].where == f"{rows}:3"


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"prompt": "1"}\n{"prompt": ', ":2: not JSON"),
        ('{"prompt": ""}', ":1: the prompt is empty"),
        ('{"tokens": [1, 100]}', ":1: token 100 is outside the vocabulary of 100"),
        ('{"tokens": "1"}', ':1: "tokens" must be a list of token ids'),
        ('{"tokens": [1.5]}', ':1: "tokens" must be a list of token ids'),
        ('{"prompt": "1", "tokens": [1]}', ":1: a prompt must be a JSON object with one of"),
        ('{"prompt": [1]}', ':1: "prompt" must be a text'),
        ('["1"]', ":1: a prompt must be a JSON object with one of"),
        ('{"prompt": "one"}', ":1: NullTokenizer --vocab-size 99 cannot read the prompt"),
        ("", " has no prompts"),
    ],
)
def test_invalid_prompts_are_refused(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(Refusal) as refusal:
        read_prompts([], file, null(), 100)
    assert message in str(refusal.value) and str(file) in str(refusal.value)


def test_missing_and_repeated_prompts_are_refused(tmp_path):
    for texts, file in (([], None), (["1"], tmp_path / "prompts.txt")):
        with pytest.raises(Refusal, match="give the prompts once"):
            read_prompts(texts, file, null(), 100)
    with pytest.raises(Refusal, match="No such file"):
        read_prompts([], tmp_path / "nothing.txt", null(), 100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the config.json of a Llama, which is enough to read flags."""
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
             "dtype": "bfloat16", "eos_token_id": [2, 5]}  # fmt: skip
    (path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--fpdt", "--fpdt is not for generation: prompts are read through the ring at once"),
        ("--sequence-parallel", "--sequence-parallel is not for generation"),
        ("--zero-stage 3", "use TP or PP to split them"),
        ("--fp8-format hybrid", "use --dtype bf16; leave --fp8-format out"),
        ("--partition-position-embedding", "--partition-position-embedding is not for generation"),
        ("--num-virtual-stages-per-pipeline-rank 2", "stages work one after the other"),
        ("--lr=1e-3", "--lr is not for generation: generation does not use"),
        ("--num-layers 3", "--num-layers is not for generation"),
        ("--attention-mask full", "use a causal mask"),
        ("--window-size 8,8", "--window-size 8,8 lets tokens attend to later ones"),
        ("--attention-mask block-sparse", "block-sparse is not for generation"),
        ("--attention-mask document", "a prompt is one document"),
        ("--context-parallel-balance documents", "--context-parallel-balance documents"),
        ("--ulysses-parallel-size 3", "--ulysses-parallel-size 3"),
        ("--top-kk 3", "--top-kk"),
    ],
)
def test_refused_by_name(folder, flags, message):
    with pytest.raises(Refusal) as refusal:
        configure(f"{NULL} {flags}".split(), str(folder), None, None, 1)
    assert message in str(refusal.value)


def test_a_mask_of_another_name_that_sees_ahead_is_refused_by_its_name(monkeypatch):
    config = parse(["--attention-mask", "causal"])
    config.attention.attention_mask = "prefix"
    monkeypatch.setitem(MASKS, "prefix", MaskKind("", sees_ahead=True))
    with pytest.raises(Refusal, match="--attention-mask prefix lets tokens attend to later ones"):
        check_mask(config)


def test_settings_from_a_hugging_face_folder(folder, tmp_path):
    config, saved = configure(NULL.split(), str(folder), None, None, 1)
    assert config.optimizer.bf16 and saved.stop == (2, 5)
    assert not configure(NULL.split(), str(folder), None, "fp32", 1)[0].optimizer.bf16
    with pytest.raises(Refusal, match="--load .* holds no checkpoint"):
        configure(NULL.split(), str(tmp_path), None, None, 1)
    with pytest.raises(Refusal, match="no such|not a|--tokenizer-model"):  # this tokenizer cannot be read
        (folder / "tokenizer_config.json").write_text("{}")
        try:
            build_tokenizer(configure([], str(folder), None, None, 1)[0].data, None)
        finally:
            (folder / "tokenizer_config.json").unlink()


def test_settings_from_our_checkpoint(tmp_path):
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 48 --max-position-embeddings 48 "
    words += f"--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --window-size 9,0 --bf16 {NULL}"
    saved = tmp_path / "iter_0000003"
    saved.mkdir()
    (saved / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    torch.save({"config": asdict(parse(words.split(), None, 1))}, saved / "common.pt")
    config, result = configure([], str(tmp_path), None, None, 3)
    assert config.attention.attention_mask == "window" and tuple(config.attention.window_size) == (9, 0)
    assert (config.data.tokenizer_type, config.model.vocab_size) == ("NullTokenizer", 99)
    assert config.optimizer.bf16 and config.model.num_layers == 2 and result.stop is None
    other = "--attention-mask causal --tokenizer-type ByteLevelTokenizer --ring-parallel-size 3"
    config, _ = configure(other.split(), str(tmp_path), None, "fp32", 3)
    assert (config.attention.attention_mask, config.attention.window_size) == ("causal", None)
    assert (config.data.tokenizer_type, config.model.vocab_size) == ("ByteLevelTokenizer", None)
    assert not config.optimizer.bf16


def test_an_answer_beyond_learned_positions_is_refused():
    model = ModelConfig(position_embedding_type="learned_absolute", max_position_embeddings=16)
    check_length(Config(model=model), 10, 7, "--prompt 1")
    with pytest.raises(Refusal, match="--prompt 1 has 10 tokens.*beyond the 16 learned positions.*use at most 7"):
        check_length(Config(model=model), 10, 8, "--prompt 1")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--max-new-tokens 0", "--max-new-tokens 0 must be at least 1"),
        ("--max-new-tokens 4 --greedy --top-k 3", "--greedy does not sample, but --top-k"),
        ("--max-new-tokens 4 --temperature 0", "--temperature 0 must be above 0"),
        ("--max-new-tokens 4 --top-p 1.5", "--top-p 1.5 must be above 0 and at most 1"),
        ("--max-new-tokens 4 --top-k 0", "--top-k 0 must be at least 1"),
        ("--max-new-tokens 4 --load nothing", "--load nothing holds no checkpoint"),
    ],
)
def test_the_program_refuses_in_one_line(flags, message):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_forked(ROOT / "tools" / "generate.py", f"--load x --prompt 1 {flags}".split(), environment)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1 and message in done.stderr


# Closed form of the memory for keys and values that a rank keeps during generation.
def cache_bytes(
    shape: Shape,
    grid: Grid,
    *,
    prompt: int,
    new_tokens: int,
    batch: int = 1,
    itemsize: int = 2,
    balance: str = "zigzag",
) -> int:
    """Bytes of one rank: ``2 x layers x batch x rows x heads x head size x itemsize``.

    Rows are about ``(prompt + new tokens) / Ring``, heads are ``KV heads / (TP x Ulysses)``, at least 1; latents
    are one for all heads. The exact numbers come from the plans that the layers themselves use.

    Args:
        grid: as the rank sees it (``Grid.at``); its pipeline stages hold the same number of layers.
        prompt: tokens of the longest prompt of the batch.
        new_tokens: tokens of the longest answer, of which the last is not kept.
        batch: prompts that are answered at the same time.
        itemsize: bytes of one number.
    """
    unit = length_unit(grid.ulysses.size, grid.ring.size, balance)
    layout = SequenceLayout(-(-prompt // unit) * unit, grid, balance)
    rows = CachePlan(layout, (prompt,), new_tokens - 1).rows(grid.ring.rank)
    heads, kv_heads = shape.heads // grid.tensor.size, max(shape.kv_heads // grid.tensor.size, 1)
    if shape.latent:
        return shape.layers // grid.pipeline.size * batch * rows * (shape.latent.keys + shape.latent.rotated) * itemsize
    kept = len(head_plan(heads, kv_heads, grid.ulysses.size).kv_index[grid.ulysses.rank])
    return 2 * (shape.layers // grid.pipeline.size) * batch * rows * kept * shape.head_dim * itemsize
