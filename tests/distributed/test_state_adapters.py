# SPDX-License-Identifier: Apache-2.0
"""LoRA on linear-attention and SSM layers: no grid changes losses; checkpoints, merged weights, PEFT's folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from megatron.context_parallel import initialize_grid
from megatron.context_parallel.huggingface import parallelize
from tests.distributed import test_architectures as architectures
from tests.distributed import test_mamba2, test_qwen3_next
from tests.distributed.flags import P2, SELECTIVE, SP, T2, cp
from tests.distributed.test_gated_delta_net import DOCUMENTS, FPDT, HYBRID
from tests.distributed.test_hugging_face import over_ranks
from tests.distributed.test_hugging_face_load import COMMON
from tests.distributed.test_sft import LORA, SENT, check_peft, frozen, go_on
from tests.distributed.training_runs import compare_runs, make_job, train_and_save, train_job
from tests.errors import worst
from tests.hugging_face import LENGTH, errors, loss_of, on_one_process, save_model, whole_batch
from tests.pairs import also_in_full
from tools.convert_hf import main as convert

DELTA, MAMBA = f"{HYBRID} {LORA}", f"{test_mamba2.HYBRID} {LORA}"
FEW = f"{DOCUMENTS} {LORA} --lora-targets out_proj in_proj"
ALONE = f"{test_mamba2.SIZES} --num-layers 4 --hybrid-override-pattern MMMM {LORA}"
LAST = f"{test_mamba2.SIZES} --num-layers 4 --hybrid-override-pattern MM** {LORA} --lora-targets linear_qkv"
EXPERTS = f"{test_mamba2.EXPERTS} {LORA} --lora-targets in_proj"

# (processes, model, grid)
CASES = [
    (4, DELTA, f"{SP} {cp(1, 2)} --zero-stage 3"),
    (2, FEW, f"{SP} {SELECTIVE}"),
    (4, MAMBA, f"{cp(2, 2)} --linear-attention-exchange heads"),
    (2, ALONE, f"{T2} --zero-stage 2"),
    (2, ALONE, f"{cp(2, 1)} {FPDT} --fpdt-stream-hidden"),
    (2, LAST, f"{P2} --zero-stage 1"),  # the first stage trains nothing
    (4, EXPERTS, f"{SP} {cp(1, 2)} --expert-model-parallel-size 2"),
]  # fmt: skip


def run(flags: str, mistake: Callable[[Any], Callable[[], None]] | None = None) -> tuple[list, list, dict]:
    """Losses and norms of three steps and first gradients, with states that last, and adapters whose B is not zero."""
    from megatron.context_parallel.core.mixers import state_mixer
    from megatron.training.model import weights

    def seen(name, shape, config, device):
        return torch.empty(tuple(shape)).normal_(0, 0.1, generator=weights.generator_of(name, device))

    with mock.patch.object(state_mixer, "DECAY_RANGE", (0.01, 0.2)), mock.patch.object(weights, "draw_adapter", seen):
        undo = mistake(None) if mistake is not None else None
        try:
            job = make_job(f"{flags} --lr 1e-2")
            before = frozen(job)
            result = train_job(job, 3)
        finally:
            if undo is not None:
                undo()
    assert frozen(job) == before, "the base has changed"
    return result


def names_of(grads: dict[str, torch.Tensor]) -> set[str]:
    return {name.split(".")[-2] for name in grads}


@pytest.mark.parametrize("world, model, grid", CASES)
@pytest.mark.usual(1, 3, 5)
def test_adapters_do_not_depend_on_the_grid(pool, reference, world, model, grid):
    compare_runs(pool.run(run, world, f"{model} {grid}", timeout=180), reference(run, model))


ALL = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"}


@pytest.mark.parametrize(
    "model, expected",
    [(DELTA, ALL | {"in_proj", "out_proj"}), (MAMBA, ALL | {"in_proj"}), (ALONE, {"in_proj"})],
)
def test_every_linear_layer_that_peft_adapts_has_an_adapter(reference, model, expected):
    *_, grads = reference(run, model)
    assert names_of(grads) == expected
    assert all(name.endswith(("lora_a", "lora_b")) and grad.any() for name, grad in grads.items())


def cut_evenly(_: Any) -> Callable[[], None]:
    """A mistake: TP splits the rows of B into equal parts, whatever their kind."""
    from megatron.context_parallel.core.mixers import state_mixer

    right, state_mixer.BY_KIND = state_mixer.BY_KIND, ("weight",)
    return lambda: setattr(state_mixer, "BY_KIND", right)


def own_rows(_: Any) -> Callable[[], None]:
    """A mistake: A has the gradient of this TP rank's rows alone."""
    from megatron.context_parallel.core import lora

    right = lora.copy_to_tensor_model_parallel_region
    lora.copy_to_tensor_model_parallel_region = lambda x, group: x
    return lambda: setattr(lora, right.__name__, right)


# ---- Checkpoints, and Hugging Face.


NEMOTRON = {name: size for name, size in architectures.KINDS["nemotron_h"].items() if "expert" not in name} | {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]
}  # fmt: skip
KINDS = {
    "qwen3_next": (
        architectures.KINDS["qwen3_next"] | {"num_attention_heads": 8},
        "--lora-targets linear_qkv linear_proj in_proj out_proj",
    ),
    "nemotron_h": (NEMOTRON, ""),
    "mamba2": (architectures.KINDS["mamba2"] | {"num_hidden_layers": 4}, ""),
    "deepseek_v3": (architectures.DEEPSEEK | {"num_hidden_layers": 4}, "--lora-targets linear_qkv linear_proj"),
}
GRIDS = {"qwen3_next": (4, f"{SP} {cp(1, 2)}"), "nemotron_h": (2, SP), "mamba2": (2, f"{cp(1, 2)} --zero-stage 1"),
         "deepseek_v3": (4, f"{SP} {cp(1, 2)} {SENT}")}  # fmt: skip
MODULES = {
    "qwen3_next": {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"},
    "nemotron_h": {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "up_proj", "down_proj"},
    "mamba2": {"in_proj"},
    "deepseek_v3": {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"},
}


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", *also_in_full("mamba2", "deepseek_v3")])
@pytest.mark.usual(1)
def test_merged_weights_and_peft_compute_the_same(pool, tmp_path, kind):
    """The loss here, of the merged model in transformers, and of the base with the adapters that PEFT loads."""
    sizes, targets = KINDS[kind]
    base, merged, adapter = (tmp_path / name for name in ("hf", "merged", "peft"))
    save_model(base, kind, sizes)
    assert convert(["--from-hf", str(base), "--to", str(tmp_path / "base")]) == 0
    flags = f"--model hf:{base} {LORA} {targets} --lr 1e-2 {COMMON}"
    world, grid = GRIDS[kind]
    tuned = str(tmp_path / "tuned")
    first = f"{flags} {tmp_path / 'base'} --finetune {grid}"
    _, losses = pool.run(train_and_save, world, first, tuned, 2, 1, timeout=120)[0]
    one, mean, tokens, labels = pool.run(go_on, 1, f"{flags} {tuned}", 1, timeout=120)[0]
    assert one == pytest.approx(losses, rel=1e-5)
    loss = partial(loss_of, tokens=tokens, labels=labels)
    assert convert(["--from", tuned, "--to-hf", str(merged)]) == 0
    assert convert(["--from", tuned, "--to-peft", str(adapter), "--base", "some/base"]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(base)
    assert loss(theirs) != pytest.approx(mean, rel=1e-3)
    assert loss(AutoModelForCausalLM.from_pretrained(merged)) == pytest.approx(mean, rel=1e-5)
    prefix = ("model.", "backbone.") if kind == "nemotron_h" else ("", "")  # in the model, and in its files
    described = check_peft(adapter, AutoModelForCausalLM.from_pretrained(merged), theirs, prefix)
    assert {*described["target_modules"]} == MODULES[kind]
    assert loss(PeftModel.from_pretrained(theirs, adapter)) == pytest.approx(mean, rel=1e-5)


ADAPTED = {
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"], "qwen3_5_text": "all-linear",
    "olmo_hybrid": "all-linear", "kimi_linear": "all-linear", "mamba2": ["in_proj"],
    "nemotron_h": ["in_proj", "q_proj"],
}  # fmt: skip


def peft_over_ranks(kind: str, ulysses: int, ring: int) -> dict[str, float]:
    """PEFT's adapters in a model of transformers: logits, loss and gradients over ranks, against one process."""
    grid = initialize_grid(ulysses=ulysses, ring=ring)
    model = get_peft_model(test_qwen3_next.hybrid(kind), LoraConfig(target_modules=ADAPTED[kind], r=4)).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    batch = whole_batch(packed=False)
    expected = on_one_process(model, batch)
    with parallelize(model, grid, seq_length=LENGTH) as context:
        return errors(over_ranks(model, batch, context), expected)


@pytest.mark.parametrize("kind", ["qwen3_next", *also_in_full(*(kind for kind in ADAPTED if kind != "qwen3_next"))])
def test_peft_adapts_layers_with_a_state_over_ranks(pool, kind):
    results = pool.run(peft_over_ranks, 4, kind, 2, 2, timeout=120)
    assert all("lora" in name for name in results[0] if name not in ("logits", "loss")) and len(results[0]) > 2
    assert worst(rank.values() for rank in results) < 1e-4, results[0]


def test_peft_has_no_adapters_on_the_output_projection_of_mamba2():
    """The reason why out_proj of Mamba2 is refused here."""
    with pytest.raises(ValueError, match="'out_proj' is incompatible with Mamba-based models"):
        get_peft_model(test_qwen3_next.hybrid("mamba2"), LoraConfig(target_modules=["in_proj", "out_proj"]))
