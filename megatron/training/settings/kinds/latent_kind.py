# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention (MLA) of DeepSeek and Kimi: keys and values are made from a latent of each token."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from megatron.formulas.kinds.latent_figures import Latent
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, refuse_combinations
from megatron.training.settings.flag import ABOVE_ZERO, flag, function, size, weights
from megatron.training.settings.kinds.kind import Kind, Model, Run, settings_of
from megatron.training.settings.read_with import of_kind

FLAG = "--multi-latent-attention"
LATENT = of_kind("multi_latent_attention")


@settings_of(LATENT)
class LatentSettings:
    """Settings of multi-latent attention."""

    multi_latent_attention: bool = weights(
        False, "keys and values from a latent of each token (MLA), as in DeepSeek V3"
    )
    q_lora_rank: int | None = size(None, "MLA: width of the queries' latent; default none")
    kv_lora_rank: int = size(32, "MLA: width of the latent of keys and values")
    qk_head_dim: int = size(128, "MLA: entries of a query or key head that are not rotated")
    qk_pos_emb_head_dim: int = size(64, "MLA: entries of a query or key head that RoPE rotates")
    v_head_dim: int = size(128, "MLA: size of a value head")
    latent_norm_epsilon: float | None = function(
        None, "MLA: epsilon of the latents' norms; default --norm-epsilon", range=ABOVE_ZERO
    )
    rope_type: str | None = flag(
        None, "MLA: RoPE; default yarn, which is rope at --rotary-scaling-factor 1", choices=["rope", "yarn"]
    )


def _prepare(config: Run) -> None:
    """Complete the settings of MLA; refuse those that contradict it or are not supported with it."""
    model = config.model
    if not model.multi_latent_attention:
        if model.rope_type == "yarn":
            raise Refusal(
                "--rope-type yarn",
                f"is read with {FLAG}: use --position-embedding-type yarn",
                Fix("--position-embedding-type yarn", drop="--rope-type"),
            )
        return
    _combinations(config)
    _rope(config)
    tensor = config.parallel.tensor_model_parallel_size
    cut = {"--q-lora-rank": model.q_lora_rank or 0, "--kv-lora-rank": model.kv_lora_rank + model.qk_pos_emb_head_dim}
    for name, width in cut.items():
        if width % tensor:
            what = " plus --qk-pos-emb-head-dim" if name == "--kv-lora-rank" else ""
            raise Refusal(
                f"{name}{what} {width}", f"is not a multiple of --tensor-model-parallel-size {tensor}: use one"
            )
    model.kv_channels = model.qk_head_dim + model.qk_pos_emb_head_dim  # the head of a key, whatever --kv-channels says


def _combinations(config: Run) -> None:
    model = config.model
    refused = {
        "--group-query-attention": (model.group_query_attention, "each head has keys of its own, from the latent"),
        "--fp8-format": (model.fp8_format, "it needs Transformer Engine's layers"),
        "--rotary-percent": (model.rotary_percent != 1, "the rotated entries are --qk-pos-emb-head-dim"),
        "--rotary-interleaved": (model.rotary_interleaved, "its pairs are neighbours anyway"),
        "--rotary-base-local": (model.rotary_base_local, "all its layers have the same RoPE"),
        "--softmax-scale": (model.softmax_scale, "the scale follows from the sizes and from YaRN"),
        "--attention-output-gate": (model.attention_output_gate, "the gate is projected with the queries"),
        "--use-rope-scaling": (model.use_rope_scaling, "use --rotary-scaling-factor"),
        "--rotary-seq-len-interpolation-factor": (
            model.rotary_seq_len_interpolation_factor,
            "use --rotary-scaling-factor",
        ),
        "--elastic --gpu": (
            config.parallel.elastic and config.simulation.gpu,
            "the planner does not know its time and memory: leave --gpu out, or use --elastic-grids",
        ),
    }
    refuse_combinations(FLAG, refused)
    if config.parallel.latent_exchange == "latents" and config.chunks.fpdt:
        raise Refusal("--latent-exchange latents with --fpdt", "is not supported: chunks send keys", LEAVE_OUT)


def _rope(config: Run) -> None:
    """Megatron-LM's --rope-type as our kinds of positions."""
    model, kind = config.model, config.model.position_embedding_type
    if kind not in ("rope", "yarn"):
        raise Refusal(
            f"{FLAG} with --position-embedding-type {kind}",
            "rotates --qk-pos-emb-head-dim entries of each head: use --position-embedding-type rope",
            Fix("--position-embedding-type rope"),
        )
    if kind == "yarn" and model.rope_type == "rope":
        raise Refusal("--rope-type rope with --position-embedding-type yarn", "are two kinds: leave one out", LEAVE_OUT)
    if model.qk_pos_emb_head_dim % 2:
        raise Refusal(f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}", "is odd, but RoPE rotates pairs: change it")
    if model.yarn_rotary_scaling_factor == 1:
        if kind == "rope" and _reset_yarn(model):
            config.notes.append("no effect here: the settings of YaRN (--rotary-scaling-factor is 1)")
        return
    if model.rope_type == "rope":
        config.notes.append("no effect here: --rotary-scaling-factor (--rope-type rope does not read it)")
        _reset_yarn(model)
    else:
        model.position_embedding_type = "yarn"


def _reset_yarn(model: Model) -> bool:
    """Give YaRN's settings their defaults; returns whether one had another value."""
    changed = False
    for field in fields(model):
        if field.name.startswith("yarn_"):
            changed |= getattr(model, field.name) != field.default
            setattr(model, field.name, field.default)
    return changed


def _note_ring(config: Run) -> str | None:
    """When the ring sends more with keys and values than it would with latents."""
    model, parallel = config.model, config.parallel
    if parallel.ring_parallel_size == 1 or config.chunks.fpdt or parallel.latent_exchange == "latents":
        return None
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size // parallel.ulysses_parallel_size
    sent, latent = heads * (model.kv_channels + model.v_head_dim), model.kv_lora_rank + model.qk_pos_emb_head_dim
    if latent >= sent:
        return None
    return (
        f"{FLAG}: the ring sends keys and values, {sent} numbers a token and rank; with --latent-exchange latents "
        f"it sends {latent}, and each rank makes the keys and values of its heads"
    )


def _shape(model: Model) -> dict[str, Any]:
    rotated, value = model.qk_pos_emb_head_dim, model.v_head_dim
    return {"latent": Latent(model.q_lora_rank or 0, model.kv_lora_rank, rotated, value)}


def _core(config: Run) -> dict[str, Any]:
    """RoPE's settings are not among them: it is ours."""
    model, sharper = config.model, 1.0
    if model.position_embedding_type == "yarn":
        sharper = 0.1 * model.yarn_mscale_all_dim * math.log(model.yarn_rotary_scaling_factor) + 1.0
    return {
        "kv_channels": model.v_head_dim,
        "softmax_scale": sharper**2 / math.sqrt(model.kv_channels),
        "qk_layernorm": False,  # else core sums the gradient of the latent's norm over TP, which has it complete
    }


KIND = Kind(
    LATENT,
    _shape,
    prepare=_prepare,
    note=_note_ring,
    core=_core,
    mixer="latent_attention:latent_attention",
    layers=lambda model: [1] * model.num_layers,
    options=lambda config: {"normed": config.model.qk_layernorm, "epsilon": config.model.latent_norm_epsilon},
)
