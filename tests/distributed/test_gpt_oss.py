# SPDX-License-Identifier: Apache-2.0
"""gpt-oss is the model of transformers: sinks, windows in every second layer, YaRN, biases, experts with a limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.distributed.training_runs import compare_gradients, make_job, train_job
from tests.hugging_face import draw_weights

HIDDEN, FFN, HEADS, GROUPS, SIZE, EXPERTS, LAYERS, WORDS = 64, 32, 8, 4, 16, 4, 2, 301
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS, "head_dim": SIZE, "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
    "vocab_size": WORDS, "max_position_embeddings": 64, "sliding_window": 12, "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": False, "pad_token_id": None,
    "swiglu_limit": 0.7,  # so low that it matters
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                        "original_max_position_embeddings": 16, "rope_theta": 10000.0},
}  # fmt: skip
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS} "
    f"--group-query-attention --num-query-groups {GROUPS} --kv-channels {SIZE} --window-size 11,0 "
    "--window-attn-skip-freq 2 --softmax-type learnable --position-embedding-type yarn "
    "--yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 16 "
    "--no-yarn-correction-range-round-to-int --normalization RMSNorm --quick-geglu --glu-linear-offset 1 "
    f"--activation-func-clamp-value 0.7 --num-experts {EXPERTS} --moe-router-topk 2 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --vocab-size 300 "
    "--make-vocab-size-divisible-by 1"
)
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel"
T2 = f"{SPLIT} --expert-tensor-parallel-size 1"
U2, R2, EP2 = "--ulysses-parallel-size 2", "--ring-parallel-size 2", "--expert-model-parallel-size 2"
GRIDS = {
    "one process": (1, ""),
    "TP 2 x U 2 x R 2": (8, f"{T2} {U2} {R2}"),
    "EP 2 x U 2": (2, f"{EP2} {U2} --moe-token-dispatcher-type alltoall"),
    "TP 2 x EP 2, experts over TP": (4, f"{SPLIT} {EP2} --moe-token-dispatcher-type alltoall"),
    "TP 2 x R 2, experts over TP, FPDT": (4, f"{SPLIT} {R2} --fpdt --fpdt-chunk-size 32"),
    "TP 2 x EP 2 x R 2, PP 2": (8, f"{T2} {EP2} {R2} --pipeline-model-parallel-size 2"),
}


def model() -> torch.nn.Module:
    torch.manual_seed(3)
    config = AutoConfig.for_model("gpt_oss", **CONFIG)
    one = draw_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval())
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=0.5)
    return one


def by_our_names(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights or gradients of transformers' gpt-oss, by the names and in the order of our model."""
    found = {
        "embedding.word_embeddings.weight": theirs["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": theirs["model.norm.weight"],
        "output_layer.weight": theirs["lm_head.weight"],
    }
    for layer in range(LAYERS):
        ours, own = f"decoder.layers.{layer}", f"model.layers.{layer}"
        for kind in ("weight", "bias"):
            parts = [theirs[f"{own}.self_attn.{name}_proj.{kind}"].unflatten(0, (GROUPS, -1)) for name in "qkv"]
            found[f"{ours}.self_attention.linear_qkv.{kind}"] = torch.cat(parts, dim=1).flatten(0, 1)
            found[f"{ours}.self_attention.linear_proj.{kind}"] = theirs[f"{own}.self_attn.o_proj.{kind}"]
            found[f"{ours}.mlp.router.{kind}"] = theirs[f"{own}.mlp.router.{kind}"]
        found[f"{ours}.self_attention.core_attention.softmax_offset"] = theirs[f"{own}.self_attn.sinks"]
        found[f"{ours}.input_layernorm.weight"] = theirs[f"{own}.input_layernorm.weight"]
        found[f"{ours}.pre_mlp_layernorm.weight"] = theirs[f"{own}.post_attention_layernorm.weight"]
        for number in range(EXPERTS):
            expert, mlp = f"{ours}.mlp.experts.local_experts.{number}", f"{own}.mlp.experts"
            up, up_bias = theirs[f"{mlp}.gate_up_proj"][number].t(), theirs[f"{mlp}.gate_up_proj_bias"][number]
            found[f"{expert}.linear_fc1.weight"] = torch.cat([up[::2], up[1::2]])  # theirs alternate gate and up
            found[f"{expert}.linear_fc1.bias"] = torch.cat([up_bias[::2], up_bias[1::2]])
            found[f"{expert}.linear_fc2.weight"] = theirs[f"{mlp}.down_proj"][number].t()
            found[f"{expert}.linear_fc2.bias"] = theirs[f"{mlp}.down_proj_bias"][number]
    return found


def ours(flags: str) -> dict[str, Any]:
    """The first loss and its gradients, with the weights of :func:`model`."""
    from megatron.core.parallel_state import get_expert_tensor_parallel_rank, get_expert_tensor_parallel_world_size

    from megatron.context_parallel.core.experts import EXPERT
    from megatron.training.model.weights import canonical_parameters, sections, tensor_parallel_part

    job = make_job(flags, llama=False)
    weights, tensor = by_our_names(model().state_dict()), job.runtime.grid.tensor
    of_experts = get_expert_tensor_parallel_world_size(), get_expert_tensor_parallel_rank()
    with torch.no_grad():
        for chunk in job.model_chunks:
            for name, parameter in canonical_parameters(chunk.module):
                whole = weights[name]
                size, rank = of_experts if EXPERT in name else (tensor.size, tensor.rank)
                if getattr(parameter, "tensor_model_parallel", False) and size > 1:
                    rows = parameter.size(0) * size
                    if parameter.partition_dim == 0 and rows > len(whole):  # the vocabulary is padded
                        whole = torch.cat([whole, whole.new_zeros((rows - len(whole), *whole.shape[1:]))])
                    shares = sections(parameter)
                    whole = tensor_parallel_part(whole, parameter.partition_dim, shares, size, rank)
                parameter.copy_(whole)
    sets = job.datasets[0]
    whole = [sets[index] for index in range(job.config.data.global_batch_size)]
    tokens, labels = (torch.stack([torch.as_tensor(one[name]) for one in whole]) for name in ("tokens", "labels"))
    losses, norms, grads = train_job(job, 1)
    return {"loss": losses[0], "norm": norms[0], "grads": grads, "tokens": tokens, "labels": labels}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.usual(0, 2, 3, 4)
def test_it_is_the_model_of_transformers(pool, grid):
    world, flags = GRIDS[grid]
    results, one = pool.run(ours, world, f"{FLAGS} {flags}", timeout=120), model()
    logits = one(results[0]["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), results[0]["labels"].flatten())
    loss.backward()
    wanted = by_our_names({name: parameter.grad for name, parameter in one.named_parameters()})
    norm = sum(float(grad.double().square().sum()) for grad in wanted.values()) ** 0.5
    for mine in results:
        assert mine["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert mine["norm"] == pytest.approx(norm, rel=1e-5)
    compare_gradients([mine["grads"] for mine in results], wanted, 1e-4, padded=True)


@pytest.mark.parametrize("left_out", ["--activation-func-clamp-value 0.7", "--glu-linear-offset 1",
                                      "--window-size 11,0 --window-attn-skip-freq 2"])  # fmt: skip
def test_each_part_matters(pool, left_out):
    assert left_out in FLAGS
    results, one = pool.run(ours, 1, FLAGS.replace(left_out, ""), timeout=120), model()
    with torch.no_grad():
        logits = one(results[0]["tokens"]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), results[0]["labels"].flatten())
    assert results[0]["loss"] != pytest.approx(loss.item(), rel=1e-4)


def with_whole_biases(flags: str) -> dict[str, Any]:
    """A mistake: each rank of expert TP adds the bias, as core does."""
    from unittest.mock import patch

    from megatron.context_parallel.core import experts

    with patch.object(experts, "_share_of_bias", lambda module, args, result, group: result):
        return ours(flags)


def test_a_bias_that_each_rank_adds_is_noticed(pool):
    right, wrong = (pool.run(run, 2, f"{FLAGS} {SPLIT}", timeout=120)[0]["loss"] for run in (ours, with_whole_biases))
    assert wrong != pytest.approx(right, rel=1e-4)
