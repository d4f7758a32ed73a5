# SPDX-License-Identifier: Apache-2.0
"""The model is Llama, Mixtral or DeepSeek: the same weights give the same logits in transformers.

The steps are a user's: save_pretrained, tools/convert_hf.py, the printed flags, ``--load``; then a forward pass.
"""

from __future__ import annotations

import io
import shlex
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from megatron.training.families.architectures import described
from tests.distributed.training_runs import make_job, train_job
from tests.errors import worst
from tests.pairs import also_in_full
from tools.convert_hf import main as convert

LENGTH, VOCABULARY = 64, 301
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass
class Case:
    """A converted model, and the logits of Hugging Face's model for some tokens."""

    flags: list[str]
    folder: str
    tokens: Tensor  # int64 [2, LENGTH]
    logits: Tensor  # fp32 [2, LENGTH, VOCABULARY]


def make(folder: Path, kind: str = "llama", **settings: object) -> Case:
    """A random model, saved, converted and run. Its weights are large, so that each affects the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16384,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(kind, **(given | settings))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-1.5, 1.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
        tokens = torch.randint(VOCABULARY, (2, LENGTH))
        logits = model(tokens).logits
    model.save_pretrained(folder / "hf", max_shard_size="200KB")
    with redirect_stdout(io.StringIO()) as out:
        assert convert(["--from-hf", str(folder / "hf"), "--to", str(folder / "ours")]) == 0
    flags = shlex.split(out.getvalue().splitlines()[-1])[1:]
    return Case(flags, str(folder / "ours"), tokens, logits)


def largest_difference(case: Case, grid: list[str]) -> float:
    """Largest difference between our logits on a grid and Hugging Face's; on every rank."""
    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint import checkpoint
    from megatron.training.checkpoint.checksums import choose_whole
    from megatron.training.model.build import build_model
    from megatron.training.setup import start

    run = ["--device", "cpu", "--seq-length", str(LENGTH), "--micro-batch-size", "2", "--train-iters", "1", "--lr", "1"]
    config = parse([*case.flags, *run, "--mock-data", *grid], world_size=dist.get_world_size())
    runtime = start(config)
    model = build_model(config, runtime.grid, runtime.layout, VOCABULARY, runtime.device)
    no_optimizer = SimpleNamespace(reload_model_params=lambda: None)
    result = choose_whole(checkpoint.find(config.checkpoint), config.checkpoint, config.notes)
    checkpoint.load(result, model, no_optimizer, None, config)
    layout, tensor = runtime.layout, runtime.grid.tensor
    with torch.no_grad():
        mine = (
            model[0]
            .eval()(
                input_ids=layout.shard(case.tokens, 1),
                position_ids=layout.positions.expand(2, -1),
                attention_mask=None,
            )
            .contiguous()
        )  # [2, s_local, padded vocabulary / TP]
    parts = [torch.empty_like(mine) for _ in range(tensor.size)]
    dist.all_gather(parts, mine, group=tensor.group)
    logits = layout.gather(torch.cat(parts, -1)[..., :VOCABULARY].contiguous(), 1)
    assert logits.shape == case.logits.shape
    return float((logits - case.logits).abs().max())


def check(pool, world_size: int, case: Case, grid: str = "") -> None:
    assert case.logits.std() > 0.5  # otherwise the tolerance would be too wide
    differences = pool.run(largest_difference, world_size, case, shlex.split(grid))
    assert worst(differences) < 1e-4, differences


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Grouped queries, untied embeddings: one model for all grids."""
    return make(tmp_path_factory.mktemp("gqa"))


CP = "--ulysses-parallel-size 2 --ring-parallel-size 2"


@pytest.mark.parametrize(
    "world_size, grid",
    [
        (1, ""),
        (4, f"{CP} --context-parallel-balance contiguous"),
        (8, f"--tensor-model-parallel-size 2 {CP}"),
        (8, f"--tensor-model-parallel-size 2 --sequence-parallel {CP}"),
    ],
)
@pytest.mark.usual(0, 1)
def test_grids(pool, gqa: Case, world_size: int, grid: str) -> None:
    check(pool, world_size, gqa, grid)


@pytest.mark.lab
def test_mixtral(pool, tmp_path: Path) -> None:
    """The experts of a Mixtral, on one process, spread over ranks, and split over TP."""
    case = make(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    check(pool, 1, case)
    check(pool, 4, case, f"{CP} --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall")
    check(pool, 4, case, "--tensor-model-parallel-size 2 --sequence-parallel --ring-parallel-size 2")


LATENT = {"num_key_value_heads": 8, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
          "num_hidden_layers": 2, "intermediate_size": 96, "n_routed_experts": 8, "moe_intermediate_size": 32,
          "n_shared_experts": 1, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5, "initializer_range": 0.15,
          "vocab_size": VOCABULARY}  # fmt: skip
LATENT_YARN = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
               "mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
V3 = LATENT | {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
DEEPSEEK = {
    "v3": V3 | {"rope_parameters": LATENT_YARN},
    "v3, dense": V3 | {"first_k_dense_replace": 2},
    "v2": LATENT | {"q_lora_rank": None, "first_k_dense_replace": 0, "rope_parameters": LATENT_YARN},
}


def first_gradients(flags: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the batch, all gradients) of a run's first step."""
    from megatron.training.job import batches_for

    job = make_job(flags)
    batch = next(batches_for(job, job.datasets[0], 0, 0))
    return batch, train_job(job, 1)[2]


def as_ours(model: PreTrainedModel) -> dict[str, Tensor]:
    """The gradients of a model of transformers by our names."""
    theirs: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".mlp.experts." not in name:
            theirs[name] = parameter.grad
            continue
        stem, _, kind = name.rpartition(".")
        for number, grad in enumerate(parameter.grad):
            if kind == "down_proj":
                theirs[f"{stem}.{number}.down_proj.weight"] = grad
            else:
                for one, half in zip(("gate_proj", "up_proj"), grad.chunk(2)):
                    theirs[f"{stem}.{number}.{one}.weight"] = half
    settings, size, family, _ = described(model.config.to_dict(), "")
    parts: dict[str, list[Tensor]] = {}
    for piece in family.pieces(settings, size, ()):
        name = (
            piece.key if piece.layer is None or not piece.stacked else piece.key.replace("s.", f"s.{piece.layer}.", 1)
        )
        name = name.replace("experts.experts", f"experts.local_experts.{piece.expert}")
        for there, here in (("linear_q_up_proj", "q_layernorm"), ("linear_kv_up_proj", "kv_layernorm")):
            name = name.replace(f"{there}.layer_norm_", f"{here}.")
        name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        if not piece.wide:  # the bias has no gradient
            parts.setdefault(name, []).append(theirs[piece.names[0]])
    return {name: torch.cat(rows) for name, rows in parts.items()}


@pytest.mark.parametrize("name", ["v3", *also_in_full("v3, dense", "v2")])
@pytest.mark.lab
def test_deepseek(pool, tmp_path: Path, name: str) -> None:
    """Logits, loss and every gradient, on one process and on TP 2 x Ulysses 2 x Ring 2."""
    from transformers import AutoModelForCausalLM

    case, whole = make(tmp_path, f"deepseek_{name[:2]}", **DEEPSEEK[name]), "--tensor-model-parallel-size 2 "
    whole += f"--sequence-parallel {CP}" + ("" if "dense" in name else " --expert-model-parallel-size 2")
    check(pool, 1, case)
    check(pool, 8, case, whole)
    flags = f"--micro-batch-size 2 --global-batch-size 2 {' '.join(case.flags)}"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").train()
    for world, grid in ((1, ""), (8, whole)):
        results = pool.run(first_gradients, world, f"{flags} {grid}", timeout=180)
        if world == 1:
            batch = results[0][0]
            each = functional.cross_entropy(
                model(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten(), reduction="none"
            )
            mask = batch["loss_mask"].flatten()
            ((each * mask).sum() / mask.sum()).backward()
            expected = as_ours(model)
        seen = set()
        for _, grads in results:
            for key, grad in grads.items():
                error = float((grad - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1e-12))
                assert error < 1e-4, f"{key}: {error:.1e} of its largest entry"
            seen |= set(grads)
        assert seen == set(expected)


def test_llama3_scaling(pool, tmp_path: Path) -> None:
    """Wavelengths below, inside and above the interpolated range; the scaling changes the logits."""
    rope = {"rope_theta": 500000.0, "rope_type": "llama3", **LLAMA3}
    case = make(tmp_path, head_dim=32, rope_parameters=rope)
    check(pool, 1, case)
    plain = make(tmp_path / "plain", head_dim=32, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"})
    assert (plain.logits - case.logits).abs().max() > 1e-2


@pytest.mark.parametrize("scaling", [{}, {"mscale": 0.707, "mscale_all_dim": 0.2, "truncate": False}], ids=str)
def test_yarn(pool, tmp_path: Path, scaling: dict) -> None:
    """Frequencies and attention factor each change the logits."""
    rope = {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 8.0, **scaling}
    rope["original_max_position_embeddings"] = 32
    case = make(tmp_path, head_dim=32, rope_parameters=rope)
    check(pool, 1, case)
    plain = make(tmp_path / "plain", head_dim=32, rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    cool = make(tmp_path / "cool", head_dim=32, rope_parameters={**rope, "attention_factor": 1.0})
    assert (plain.logits - cool.logits).abs().max() > 1e-2 and (cool.logits - case.logits).abs().max() > 1e-2
    if not scaling:
        check(pool, 1, cool)
        check(pool, 2, case, "--ulysses-parallel-size 2 --fpdt --fpdt-chunk-size 22")


def test_linear_scaling_and_mqa(pool, tmp_path: Path) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
    check(pool, 1, make(tmp_path, rope_parameters=rope, num_key_value_heads=1))


def test_tied_embeddings(pool, tmp_path: Path) -> None:
    case = make(tmp_path, tie_word_embeddings=True, num_key_value_heads=8)
    check(pool, 1, case)
    check(pool, 2, case, "--tensor-model-parallel-size 2")


def test_biases(pool, tmp_path: Path) -> None:
    check(pool, 2, make(tmp_path, attention_bias=True, mlp_bias=True), "--tensor-model-parallel-size 2")
