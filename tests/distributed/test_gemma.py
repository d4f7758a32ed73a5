# SPDX-License-Identifier: Apache-2.0
"""Gemma 2 and 3 are the models of transformers: logits, loss, every gradient, on one process and on a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron.training.families import architectures
from megatron.training.families.llama import llama_settings, llama_weights
from tests.distributed.training_runs import compare_gradients, make_job, train_job
from tests.hugging_face import save_model

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 301, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "query_pre_attn_scalar": 24, "sliding_window": 12, "pad_token_id": None,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
BASES = {"sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
         "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 20000.0}}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gemma2": SIZES | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": SIZES | {"rope_parameters": BASES},
}
T2 = "--tensor-model-parallel-size 2 --sequence-parallel"
GRIDS = {
    "one process": (1, ""),
    "TP 2 x U 2 x R 2": (8, f"{T2} --ulysses-parallel-size 2 --ring-parallel-size 2"),
    "FPDT, R 2": (2, "--ring-parallel-size 2 --fpdt --fpdt-chunk-size 32"),
    "PP 2": (2, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --loss-chunks 3"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_model(tmp_path_factory.mktemp(kind), kind, KINDS[kind])
        return made[kind]

    return of


def flags_of(folder: Path) -> str:
    """The flags of the network, as tools/convert_hf.py prints them."""
    model = described(folder)
    words = llama_settings.command_line(model.settings, torch.float32)
    words += llama_settings.window_flags(model.attention)
    size = model.vocab_size - 1  # the tokenizer adds an id
    return " ".join([*words, f"--vocab-size {size} --make-vocab-size-divisible-by 1 --load {folder}"])


def described(folder: Path) -> architectures.Described:
    return architectures.described(llama_settings.read_config(folder / "config.json"), folder)


def ours(flags: str) -> dict[str, Any]:
    """Logits [b, s, vocabulary] of the first batch on all ranks, the first loss, and its gradients."""
    from megatron.context_parallel.fpdt.chunked_loss import gather

    job = make_job(flags, llama=False)
    runtime = job.runtime
    sets = job.datasets[0]
    whole = [sets[index] for index in range(job.config.data.global_batch_size)]
    tokens, labels = (torch.stack([torch.as_tensor(one[name]) for one in whole]) for name in ("tokens", "labels"))
    logits = None
    if runtime.grid.pipeline.size == 1:
        layout = runtime.layout
        local = [layout.shard(x, dim=1) for x in (tokens, torch.arange(tokens.size(1)).expand_as(tokens))]
        with torch.no_grad():
            mine = job.model_chunks[0].module.eval()(*local, None)
        job.model_chunks[0].module.train()
        mine = mine.permute(2, 0, 1).contiguous()  # [vocabulary / TP, b, s_local]
        if runtime.grid.tensor.size > 1:
            mine = gather(mine, runtime.grid.tensor)
        logits = layout.gather(mine, dim=2).permute(1, 2, 0)
    losses, _, grads = train_job(job, 1)
    return {"loss": losses[0], "grads": grads, "logits": logits, "tokens": tokens, "labels": labels}


def theirs(folder: Path, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return {"loss": loss.item(), "logits": logits.detach(), "grads": {n: p.grad for n, p in model.named_parameters()}}


def fused(folder: Path, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of transformers by our names."""
    model, rows = described(folder), {}
    for piece in architectures.pieces(model, ()):
        name = piece.key.replace("layers.", f"layers.{piece.layer}.") if piece.layer is not None else piece.key
        part = llama_weights.fuse(piece, [grads[one] for one in piece.names], model.settings.num_query_groups)
        rows.setdefault(name, []).append(part)
    return {name: torch.cat(parts) for name, parts in rows.items()}


# In the layers the norms have their own names; in checkpoints those of Transformer Engine's fused layers, and hybrids
# have core's names.
NAMES = {
    "linear_q_up_proj.layer_norm_": "q_layernorm.",
    "linear_kv_up_proj.layer_norm_": "kv_layernorm.",
    "mixer.in_proj.layer_norm_": "input_layernorm.",
    "mixer.": "self_attention.",
    "final_norm.": "final_layernorm.",
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def in_model(name: str) -> str:
    for saved, own in NAMES.items():
        name = name.replace(saved, own)
    return name


USUAL = {
    ("gemma2", "TP 2 x U 2 x R 2"),
    ("gemma2", "PP 2"),
    ("gemma3_text", "one process"),
    ("gemma3_text", "FPDT, R 2"),
}


@pytest.mark.parametrize(
    "kind, grid",
    [
        pytest.param(kind, grid, marks=() if (kind, grid) in USUAL else pytest.mark.full)
        for kind in KINDS
        for grid in GRIDS
    ],
)
@pytest.mark.usual(1, 2, 3)
def test_it_is_the_model_of_transformers(pool, folders, kind, grid):
    folder, (world, flags) = folders(kind), GRIDS[grid]
    results = pool.run(ours, world, f"{flags_of(folder)} {flags}", timeout=120)
    expected = theirs(folder, results[0]["tokens"], results[0]["labels"])
    wanted = {in_model(name): grad for name, grad in fused(folder, expected["grads"]).items()}
    for mine in results:
        assert mine["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        if mine["logits"] is not None:
            error = (mine["logits"][..., :301] - expected["logits"]).abs().max() / expected["logits"].abs().max()
            assert float(error) < 1e-4
    compare_gradients([mine["grads"] for mine in results], wanted, 1e-4, padded=True)


def refusal(pool, flags: str) -> str:
    with pytest.raises(Exception, match="Refusal") as raised:
        pool.run(ours, 1, flags)
    return str(raised.value)


def test_a_run_without_the_window_is_refused(pool, folders):
    """The window is not a setting of the network here, but a Gemma without it is another model."""
    right = flags_of(folders("gemma2"))
    for wrong in ("", " --window-size 11,0"):
        flags = right.replace(" --window-size 11,0 --window-attn-skip-freq [1,0,1]", wrong)
        assert flags != right
        assert "--window-attn-skip-freq [1,0,1] in the checkpoint, None in this run" in refusal(pool, flags)


def test_conversion_there_and_back(folders, tmp_path):
    from safetensors.torch import load_file

    from tools.convert_hf import main

    for kind in KINDS:
        source, there, back = folders(kind), tmp_path / f"{kind}-ours", tmp_path / f"{kind}-back"
        assert main(["--from-hf", str(source), "--to", str(there)]) == 0
        assert main(["--from", str(there), "--to-hf", str(back)]) == 0
        for path in source.iterdir():
            if path.name != "checksums.json":
                assert path.read_bytes() == (back / path.name).read_bytes(), path.name
        # Without the original's files, transformers reads the same network.
        for path in (there / "hf").iterdir():
            path.unlink()
        (there / "hf").rmdir()
        alone = tmp_path / f"{kind}-alone"
        assert main(["--from", str(there), "--to-hf", str(alone)]) == 0
        tokens = torch.arange(40)[None]
        first, second = (
            AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
            for folder in (source, alone)
        )
        with torch.no_grad():
            assert torch.equal(first(tokens).logits, second(tokens).logits)
        assert set(load_file(next(alone.glob("*.safetensors")))) <= set(first.state_dict())
