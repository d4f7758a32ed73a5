# SPDX-License-Identifier: Apache-2.0
"""The engine for verl (integrations/verl), called as verl's workers call it: equal to plain transformers."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hugging_face import save_model
from tests.pairs import also_in_full

PLUGIN = Path(__file__).parents[2] / "integrations" / "verl"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        find_spec("verl") is None, reason="verl is not installed: pip install verl==0.9.1 ./integrations/verl"
    ),
]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "attention_dropout": 0.0, "pad_token_id": 0,
}  # fmt: skip
LENGTHS = [(7, 9), (3, 30), (12, 5), (20, 1), (2, 17), (9, 9), (25, 40), (5, 6)]  # prompt, answer
TEMPERATURE, LR = 0.7, 1e-2


def plugin() -> Any:
    """The plugin's module, under verl's platform for tests."""
    os.environ["VERL_PLATFORM"] = "cpu"
    if str(PLUGIN) not in sys.path:
        sys.path.insert(0, str(PLUGIN))
    import longcontext_verl

    return longcontext_verl


def engine_of(folder: str, grid: dict[str, int], kind: str = "language_model", **options: Any) -> Any:
    longcontext_verl = plugin()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    override = {"attn_implementation": "sdpa"}
    model = HFModelConfig(path=folder, load_tokenizer=False, override_config=override, **options.pop("model", {}))
    sizes = {f"{name}_parallel_size": size for name, size in grid.items()}
    settings = longcontext_verl.LongContextEngineConfig(dtype="float32", **sizes, **options)
    optimizer = FSDPOptimizerConfig(lr=LR, lr_warmup_steps=0, total_training_steps=10, weight_decay=0.0, clip_grad=1.0)
    contents = CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"])
    engine = EngineRegistry.new(
        kind, "longcontext", model_config=model, engine_config=settings, optimizer_config=optimizer,
        checkpoint_config=contents,
    )  # fmt: skip
    engine.initialize()
    return engine


def samples() -> list[tuple[Tensor, Tensor]]:
    """(ids, mask of the answer) of each sample."""
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randint(1, SIZES["vocab_size"], (n + m,), generator=draw), torch.arange(n + m).ge(n).long())
        for n, m in LENGTHS
    ]


def batch_of(rank: int, ranks: int, **others: Any) -> Any:
    """The samples of a data-parallel rank, as verl hands them to a worker."""
    from verl.utils import tensordict_utils as tu

    own = samples()[rank::ranks]
    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": jagged([ids for ids, _ in own]),
        "position_ids": jagged([torch.arange(len(ids)) for ids, _ in own]),
        "loss_mask": jagged([mask for _, mask in own]),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": TEMPERATURE}
    return tu.get_tensordict(tensors, settings | {"calculate_entropy": True} | others)


def steps(
    folder: str, grid: dict[str, int], options: dict[str, Any], count: int, resume: str = "", save: str = ""
) -> Any:
    """Log-probabilities and entropies of this rank's samples; losses and norms of some steps; weights after them."""
    engine = engine_of(folder, grid, **options)
    from verl.workers.utils.losses import sft_loss

    if resume:
        engine.load_checkpoint(resume)
    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    with engine.eval_mode():
        scores = engine.infer_batch(batch_of(rank, ranks, use_dynamic_bsz=True, max_token_len_per_gpu=80))[
            "model_output"
        ]
    found = {name: [x.clone() for x in value.unbind()] for name, value in scores.items()}
    losses, norms = [], []
    with engine.train_mode():
        for _ in range(count):
            out = engine.train_batch(batch_of(rank, ranks, temperature=1.0), partial(sft_loss, None))
            total = torch.tensor(sum(out["loss"])) / ranks
            torch.distributed.all_reduce(total, group=engine.get_data_parallel_group())
            losses.append(float(total))
            norms.append(out["metrics"]["grad_norm"] if engine.is_mp_src_rank_with_outputs() else None)
            engine.lr_scheduler_step()
    if save:
        engine.save_checkpoint(save, global_step=count, max_ckpt_to_keep=1)
    weights = dict(engine.get_per_tensor_param()[0])
    parts = sum(part.numel() for _, part, _ in engine.get_per_tensor_param_shard()[0])
    engine.context.remove()
    return (rank, ranks), found, losses, norms, weights, parts


def by_transformers(folder: str, count: int) -> tuple[list[Tensor], list[Tensor], list[float], list[float], dict]:
    """The same of plain transformers, sample by sample."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chances, entropies = [], []
    for ids, _ in samples():
        logits = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        chances.append(logits.gather(1, ids[1:, None])[:, 0].detach())
        entropies.append(-(logits.exp() * logits).sum(-1).detach())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    losses, norms, every = [], [], sum(int(mask.sum()) for _, mask in samples())
    for _ in range(count):
        optimizer.zero_grad()
        loss = sum(
            nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")[mask[1:] > 0].sum()
            for ids, mask in samples()
        )
        (loss / every).backward()
        losses.append(float(loss) / every)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return chances, entropies, losses, norms, model.state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("verl")
    save_model(path, "llama", SIZES)
    return str(path)


@pytest.fixture(scope="module")
def alone(pool, folder):
    return pool.run(by_transformers, 1, folder, 3, timeout=120)[0]


CASES = [
    (4, {"ulysses": 2, "ring": 2}, {}),
    *also_in_full(
        (1, {}, {}),
        (2, {}, {}),
        (2, {"ring": 2}, {}),
        (2, {"ulysses": 2}, {"model": {"enable_gradient_checkpointing": False}}),
        (4, {"ring": 2}, {}),
        (2, {"ring": 2}, {"fpdt_chunk_size": 16}),
        (2, {"ring": 2}, {"param_offload": True, "optimizer_offload": True}),
    ),
]


@pytest.mark.parametrize("world, grid, options", CASES)
def test_steps_are_those_of_plain_transformers(pool, folder, alone, world, grid, options):
    chances, entropies, losses, norms, weights = alone
    seen = set()
    size = sum(value.numel() for value in weights.values())
    results = pool.run(steps, world, folder, grid, options, 3, timeout=300)
    for (rank, ranks), found, my_losses, my_norms, mine, _ in results:
        for name, expected in (("log_probs", chances), ("entropy", entropies)):
            for own, right in zip(found[name], expected[rank::ranks], strict=True):
                torch.testing.assert_close(own[:-1], right, rtol=1e-4, atol=1e-5)
                assert len(own) == len(right) + 1 and own[-1] == 0
        assert my_losses == pytest.approx(losses, rel=1e-4)
        assert my_norms in ([None] * 3, pytest.approx(norms, rel=1e-4))
        seen.add(my_norms[0] is None)
        assert mine.keys() == weights.keys()
        for name, value in mine.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5, msg=name)
    assert seen == ({False} if not grid else {True, False})  # one rank of a group reports
    assert sum(parts for *_, parts in results) == size


@pytest.mark.parametrize("before, after", [((4, {"ring": 2}), (2, {"ulysses": 2}))])
def test_a_checkpoint_goes_on_on_another_grid(pool, folder, alone, tmp_path, before, after):
    *_, losses, norms, weights = alone
    saved = str(tmp_path / "saved")
    pool.run(steps, before[0], folder, before[1], {}, 2, "", saved, timeout=300)
    results = pool.run(steps, after[0], folder, after[1], {}, 1, saved, timeout=300)
    assert results[0][2] == pytest.approx(losses[2:], rel=1e-4) and results[0][3] == pytest.approx(norms[2:], rel=1e-4)
    for name, value in results[0][4].items():
        torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5, msg=name)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(Path(saved) / "huggingface").config.vocab_size == SIZES["vocab_size"]


def values_of(folder: str, grid: dict[str, int]) -> tuple[int, int, list[Tensor]]:
    engine = engine_of(folder, grid, "value_model")
    rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
    with engine.eval_mode():
        values = engine.infer_batch(batch_of(rank, ranks))["model_output"]["values"]
    engine.context.remove()
    return rank, ranks, [x.clone() for x in values.unbind()]


def test_a_critic_gives_a_value_to_each_token(pool, tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(2)
    LlamaForSequenceClassification(LlamaConfig(num_labels=1, **SIZES)).save_pretrained(tmp_path)
    model = LlamaForSequenceClassification.from_pretrained(tmp_path)
    right = [model.score(model.model(ids[None])[0])[0, :, 0].detach() for ids, _ in samples()]
    for rank, ranks, values in pool.run(values_of, 4, str(tmp_path), {"ring": 2}, timeout=180):
        for own, expected in zip(values, right[rank::ranks], strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


def changed(folder: str) -> tuple[int, int]:
    """Numbers that a step has changed, by the sharded export, of the first and of a second call."""
    engine = engine_of(folder, {"ring": 2})
    from verl.workers.utils.losses import sft_loss

    engine.prime_delta_snapshots()
    counts: list[int] = []
    for wanted in (True, False):
        if wanted:
            with engine.train_mode():
                engine.train_batch(batch_of(0, 1, temperature=1.0), partial(sft_loss, None))
        counts.append(sum(int(entry[2].sum()) for entry in engine.get_per_tensor_param_delta_shard()[0]))
    engine.context.remove()
    return counts[0], counts[1]


@pytest.mark.skipif(find_spec("fastapi") is None, reason="verl's exporter of changes imports fastapi")
def test_only_what_changed_is_exported(pool, folder, alone):
    results = pool.run(changed, 2, folder, timeout=180)
    size = sum(value.numel() for value in alone[4].values())
    assert 0.5 * size < sum(first for first, _ in results) <= size and all(second == 0 for _, second in results)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"lora_rank": 4}}, "lora_rank"),
    ({"model": {"use_fused_kernels": True}}, "use_fused_kernels"),
    ({"dtype": "float16"}, "dtype float16"),
]


def refusal_of(folder: str, options: dict[str, Any]) -> str:
    plugin()
    from longcontext_verl import config

    with pytest.raises(ValueError) as refused:
        if "dtype" in options:
            from verl.workers.config import HFModelConfig

            model = HFModelConfig(path=folder, load_tokenizer=False, override_config={"attn_implementation": "sdpa"})
            config.refuse(model, config.LongContextEngineConfig(**options))
        engine_of(folder, {}, **options)
    return str(refused.value)


@pytest.mark.parametrize("options, message", REFUSED, ids=[message for _, message in REFUSED])
def test_settings_that_are_refused(pool, folder, options, message):
    refused = pool.run(refusal_of, 1, folder, options, timeout=60)[0]
    assert message in refused and "longcontext" in refused


def test_verl_finds_the_plugin():
    found = [one.value for one in entry_points(group="verl.plugins") if one.name == "longcontext"]
    if not found:
        pytest.skip("the plugin is not installed: pip install ./integrations/verl")
    assert found == ["longcontext_verl"]


def from_words() -> tuple[str, int]:
    """The settings as verl's programs read them from a command line."""
    plugin()
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    given = {"_target_": "longcontext_verl.LongContextEngineConfig", "ring_parallel_size": 4}
    made = omega_conf_to_dataclass(OmegaConf.create(given))
    return made.strategy, made.ring_parallel_size


def test_settings_come_from_a_command_line(pool):
    assert pool.run(from_words, 1, timeout=60)[0] == ("longcontext", 4)
