# SPDX-License-Identifier: Apache-2.0
"""Learned sparsity (DSA of DeepSeek V3.2 and GLM-5): an indexer chooses the keys that a query of latents reads."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.decisions.division import choosing_layer
from megatron.formulas.kinds.sparse_figures import SparseLatent
from megatron.training.refusal import LEAVE_OUT, Fix, Refusal, refuse_combinations
from megatron.training.settings.flag import ABOVE_ZERO, AT_LEAST_1, NEVER, NOT_NEGATIVE, flag, function, size
from megatron.training.settings.kinds import latent_kind
from megatron.training.settings.kinds.kind import Kind, Model, Run, settings_of
from megatron.training.settings.read_with import of_kind

FLAG = "--experimental-attention-variant dsa"
DSA = of_kind("experimental_attention_variant", "dsa")


@settings_of(DSA)
class DsaSettings:
    """Settings of the indexer. megatron-core has them since 0.19, so none is passed to it."""

    dsa_indexer_n_heads: int | None = size(None, "DSA: heads of the indexer", core=False)
    dsa_indexer_head_dim: int | None = size(None, "DSA: size of a head of the indexer", core=False)
    dsa_indexer_topk: int | None = function(None, "DSA: keys that a query reads", range=AT_LEAST_1)
    dsa_indexer_topk_freq: int = size(
        1, "DSA: every N-th layer chooses keys, and the layers between use its choice", core=False
    )
    dsa_indexer_skip_topk_offset: int = function(
        0, "DSA: layers at the start that each choose keys, with --dsa-indexer-topk-freq", range=NOT_NEGATIVE
    )
    dsa_indexer_loss_coeff: float | None = flag(
        None,
        "DSA: factor of the indexer's loss, the divergence of its softmax from attention's; default: it is not trained",
        range=NOT_NEGATIVE,
    )
    dsa_indexer_use_sparse_loss: bool = flag(False, "DSA: this loss is over the chosen keys; otherwise over all")
    dsa_indexer_rope_interleaved: bool = function(
        False, "DSA: RoPE of the indexer rotates neighbours, as in GLM-5; otherwise two halves, as in DeepSeek"
    )
    dsa_indexer_k_norm_epsilon: float | None = function(
        None, "DSA: epsilon of the norm of the indexer's keys; default --norm-epsilon", range=ABOVE_ZERO
    )
    dsa_warm_up: bool = flag(
        False,
        "DSA: train the indexers alone while attention reads all keys; a later run or stage loads the checkpoint",
        loaded=NEVER,
        stage=True,
    )


def _prepare(config: Run) -> None:
    """Refuse what learned sparsity needs or does not work with."""
    model, chunks, attention = config.model, config.chunks, config.attention
    if not DSA.chosen(vars(model)):
        return
    if not model.multi_latent_attention:
        raise Refusal(FLAG, "needs --multi-latent-attention: add it", Fix("--multi-latent-attention"))
    for name in ("n_heads", "head_dim", "topk"):
        if getattr(model, f"dsa_indexer_{name}") is None:
            need = f"--dsa-indexer-{name.replace('_', '-')}"
            raise Refusal(FLAG, f"needs {need}: add it; DeepSeek V3.2 has 64 heads of 128 and the top 2048")
    if model.qk_pos_emb_head_dim > model.dsa_indexer_head_dim:
        raise Refusal(
            f"--dsa-indexer-head-dim {model.dsa_indexer_head_dim}",
            f"is less than --qk-pos-emb-head-dim {model.qk_pos_emb_head_dim}, the entries that RoPE rotates: use more",
        )
    learns, kernel = bool(model.dsa_indexer_loss_coeff), attention.attention_kernel
    refused = {
        f"--attention-kernel {kernel}": (
            kernel not in ("auto", "triton", "math") and not model.dsa_warm_up,
            "chosen keys have the kernels triton and math: leave it out",
        ),
        "--fpdt": (
            chunks.fpdt and learns and not model.dsa_indexer_use_sparse_loss,
            "the loss over all keys is not computed in chunks: add --dsa-indexer-use-sparse-loss",
        ),
        "--latent-exchange": (config.parallel.latent_exchange == "latents", "its ring is not used: leave it out"),
        "--keep-attention": (attention.keep_attention, "the choice would be kept, too"),
        "--attention-dropout": (model.attention_dropout, "use --attention-dropout 0"),
        "--softmax-type": (model.softmax_type != "vanilla", "attention to chosen keys has no sinks"),
        "--attn-logit-softcapping": (model.attn_logit_softcapping, "scores of chosen keys have no soft-cap"),
        "--lora-rank": (model.lora_rank and learns, "only adapters are trained: leave --dsa-indexer-loss-coeff out"),
        "--dpo": (config.data.dpo and learns, "gradients are divided by pairs: leave --dsa-indexer-loss-coeff out"),
        "--reward-model": (
            model.reward_model and learns,
            "gradients are divided by pairs: leave --dsa-indexer-loss-coeff out",
        ),
    }
    refuse_combinations(FLAG, refused, {"--attention-dropout": "--attention-dropout 0"})
    if model.dsa_warm_up and not learns:
        raise Refusal("--dsa-warm-up", "trains nothing without --dsa-indexer-loss-coeff: add it", LEAVE_OUT)
    if model.dsa_warm_up and (model.dsa_indexer_use_sparse_loss or model.lora_rank):
        other = "--lora-rank" if model.lora_rank else "--dsa-indexer-use-sparse-loss"
        raise Refusal(f"--dsa-warm-up with {other}", "is not supported: it trains indexers on all keys", LEAVE_OUT)


def _note_balance(config: Run) -> str | None:
    """When ranks have unequal work: layouts balance Ring ranks, and Ulysses ranks divide the queries of one."""
    parallel = config.parallel
    ranks = parallel.ulysses_parallel_size * parallel.ring_parallel_size
    if config.model.dsa_warm_up or parallel.ulysses_parallel_size == 1:
        return None
    return (
        f"{FLAG} is not balanced over --ulysses-parallel-size {parallel.ulysses_parallel_size}: the busiest rank "
        f"has up to {2 - 1 / ranks:.2f} times the mean work; --ring-parallel-size {ranks} alone is even"
    )


def chooses(model: Model) -> list[bool]:
    """For each layer, whether it chooses keys and does not use the choice of a layer before it."""
    shared = model.dsa_indexer_topk_freq, model.dsa_indexer_skip_topk_offset
    return [choosing_layer(n, *shared) == n for n in range(1, model.num_layers + 1)]


def _shape(model: Model) -> dict[str, Any]:
    latent = latent_kind.KIND.shape(model)["latent"]
    sizes = {field.name: getattr(latent, field.name) for field in fields(latent)}
    sizes |= {"index_heads": model.dsa_indexer_n_heads, "index_dim": model.dsa_indexer_head_dim}
    learns = bool(model.dsa_indexer_loss_coeff)
    choosing = () if model.dsa_indexer_topk_freq == 1 else tuple(chooses(model))
    return {"latent": SparseLatent(**sizes, chosen=model.dsa_indexer_topk, learns=learns, choosing=choosing)}


def _options(config: Run) -> dict[str, Any]:
    from megatron.context_parallel.core.mixers.sparse_attention import SparseRule

    model = config.model
    names = [field.name for field in fields(SparseRule) if field.name not in ("warm_up", "kernel")]
    values = {name: getattr(model, f"dsa_indexer_{name}") for name in names} | {"warm_up": model.dsa_warm_up}
    # By now `auto` may be the kernel of attention to all keys; of chosen ones, `auto` takes Triton's where it can run.
    values["kernel"] = "math" if config.attention.attention_kernel == "math" else "auto"
    values["loss_coeff"] = values["loss_coeff"] or 0.0
    values["k_norm_epsilon"] = values["k_norm_epsilon"] or model.norm_epsilon
    return latent_kind.KIND.options(config) | {"sparse": SparseRule(**values)}


KIND = Kind(
    DSA,
    _shape,
    prepare=_prepare,
    note=_note_balance,
    mixer="sparse_attention:sparse_latent_attention",
    layers=lambda model: [1] * model.num_layers,
    options=_options,
    built=lambda model: "sparse_attention:train_indexers_alone" if model.dsa_warm_up else None,
    loss=lambda model: "indexer loss" if model.dsa_indexer_loss_coeff else None,
    starts=chooses,
    trains=lambda settings: "indexers alone (--dsa-warm-up)" if settings.get("dsa_warm_up") else None,
    differs=lambda model: model.dsa_indexer_topk_freq > 1,
)
