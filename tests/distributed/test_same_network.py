# SPDX-License-Identifier: Apache-2.0
"""A model keeps its windows, masks and RoPE at every door: --load, conversion, fine-tuning, resuming, export.

The checkpoint alone says what the model is (--use-checkpoint-args); the loss is transformers' on the same tokens.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.distributed import test_architectures
from tests.distributed.flags import RUN, SP
from tests.distributed.test_architectures import SIZES
from tests.distributed.training_runs import data_of, save_job, train_job
from tests.hugging_face import loss_of, save_model
from tests.pairs import full_but
from tools.convert_hf import main as convert

WINDOWS = {"sliding_window": 12, "num_hidden_layers": 3}
SWITCHED = WINDOWS | {"use_sliding_window": True, "max_window_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    **{kind: test_architectures.KINDS[kind] for kind in ("gemma3_text", "gemma2", "olmo3", "gpt_oss")},
    "mistral": SIZES | WINDOWS,
    "phi3": SIZES | WINDOWS,
    "mixtral": SIZES | WINDOWS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": SIZES | SWITCHED,
    "qwen3": SIZES | SWITCHED | {"head_dim": 16},
    "qwen3_moe": SIZES | SWITCHED | test_architectures.EXPERTS | {"head_dim": 16},
    "llama": SIZES,
    **{kind: test_architectures.KINDS[kind] for kind in ("gpt2", "gpt_neox", "glm4_moe", "olmo2", "nemotron_h")},
    **{kind: test_architectures.KINDS[kind] for kind in ("smollm3", "ernie4_5", "granite", "exaone4")},
    "qwen3_moe mixed": test_architectures.KINDS["qwen3_moe"],
}
USUAL = ("gemma3_text", "qwen2")
CASES = full_but(KINDS, *USUAL)
ON_TP = ("llama", "qwen2", "gpt2")  # whose rows are split over TP, too
CONVERTED = ("gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "nemotron_h")  # --load does not read these themselves
COMMON = f"{RUN} --seq-length 64 --lr 1e-12 --use-checkpoint-args"
FEW = "--global-batch-size 2 --train-iters 4"


def first_losses(doors: dict[str, str], keep: str) -> tuple[dict[str, float], list[torch.Tensor]]:
    """The first loss at each door, by name, and the tokens and labels of the first door; saves a checkpoint.

    Args:
        doors: flags of each run.
        keep: where the first run is saved after its step.
    """
    from megatron.training.arguments.parser import parse
    from megatron.training.checkpoint.arguments_of import shape_of
    from megatron.training.job import prepare
    from megatron.training.setup import start

    losses, read, runtime = {}, [], None
    for name, flags in doors.items():
        config = parse(shlex.split(f"{COMMON} {FEW} {flags}"), None, dist.get_world_size(), shape_of)
        runtime = runtime or start(config)
        job = prepare(config, runtime)
        if not read:
            batch = next(data_of(job))
            read = [batch["tokens"], batch["labels"]]
        elif job.progress.consumed_train_samples:  # the same batch as at the other doors
            job.progress.consumed_train_samples = 0
        losses[name] = train_job(job, 1)[0][0]
        if name == next(iter(doors)):
            save_job(keep, job)
    return losses, read


def of_transformers(folder: Path, tokens: torch.Tensor, labels: torch.Tensor, **changes: Any) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **changes)
    return loss_of(model, tokens, labels)


@pytest.mark.parametrize("kind", CASES)
def test_a_model_is_the_same_at_every_door(pool, tmp_path, kind):
    source, ours, kept, back = (tmp_path / name for name in ("hf", "ours", "kept", "back"))
    save_model(source, kind.split()[0], KINDS[kind])
    assert convert(["--from-hf", str(source), "--to", str(ours)]) == 0
    still = "--moe-router-bias-update-rate 0" if kind in ("glm4_moe", "nemotron_h") else ""
    common = f"--vocab-size 280 {still}"  # the tokenizer has fewer ids than the model has rows
    doors = {
        "fine-tuned": f"--load {ours} --finetune {common}",
        "resumed": f"--load {kept} --override-opt-param-scheduler {common}",
    }
    if kind.split()[0] not in CONVERTED:
        doors["not converted"] = f"--load {source} {common}"
    losses, read = pool.run(first_losses, 1, doors, str(kept), timeout=120)[0]
    if kind in ON_TP:
        split, _ = pool.run(first_losses, 2, {"TP 2": f"{SP} {doors['fine-tuned']}"}, str(kept) + "2", timeout=120)[0]
        losses |= split
    assert convert(["--from", str(kept), "--to-hf", str(back)]) == 0
    wanted = of_transformers(source, *read)
    assert list(losses.values()) == pytest.approx([wanted] * len(losses), rel=1e-5), losses
    assert of_transformers(back, *read) == pytest.approx(wanted, rel=1e-5)
    if "sliding_window" in KINDS[kind]:  # a control: without the window it is another model
        assert abs(of_transformers(source, *read, sliding_window=4096) - wanted) > 1e-4 * wanted
