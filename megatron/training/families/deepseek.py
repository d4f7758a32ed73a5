# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2 and V3: their settings and weights in Hugging Face's format (transformers' deepseek_v2, deepseek_v3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import Family
from megatron.training.families.llama.llama_weights import EXPERTS, LM_HEAD, Piece, layers
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds.layer_patterns import expert_layers
from megatron.training.settings.models import LLAMA, derive_shape
from megatron.training.settings.read_with import ROTARY

EPSILON = 1e-6  # of the latents' norms in transformers, whatever rms_norm_eps says
SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
# Keys of config.json that may only have these values; the first is written if a new file must have the key.
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleave": (True,),
    "rms_norm_eps": (EPSILON,),
    "moe_layer_freq": (1,),
    "quantization_config": (None,),
}
# Our settings that every DeepSeek has.
FIXED = llama_settings.FIXED | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "norm_epsilon": EPSILON,
    "add_bias_linear": False,
    "group_query_attention": False,
    "rotary_seq_len_interpolation_factor": None,
    "use_rope_scaling": False,
}
ROUTERS = {
    "deepseek_v2": {"moe_router_score_function": "softmax", "moe_router_pre_softmax": True},
    "deepseek_v3": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}


EMBEDDING, HF_EMBEDDING = "embedding.word_embeddings.weight", "model.embed_tokens.weight"


def ahead_pieces(model: ModelConfig, layer: int) -> Iterator[Piece]:
    """What a layer of multi-token prediction has besides a layer's weights; nothing for the layers before them.

    The names are those of the released files of DeepSeek V3 and GLM-4.5. transformers reads these layers only to
    generate with them (its ``MtpModel``).
    """
    ahead, hidden = layer - model.num_layers, model.hidden_size
    if ahead < 0:
        return
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    for ours, theirs in names.items():
        shape = (hidden, 2 * hidden) if ours == "eh_proj" else (hidden,)
        name = f"model.layers.{layer}.{theirs}.weight"
        yield Piece(f"mtp.layers.{ahead}.{ours}.weight", (name,), (shape,), layer, stacked=False)


class DeepSeek(Family):
    """One of the two. They differ in the router: V2 has a softmax, V3 sigmoids, groups of experts and a bias."""

    def __init__(self, version: int) -> None:
        self.kind, self.title = f"deepseek_v{version}", f"DeepSeek V{version}"
        self.architecture = f"DeepseekV{version}ForCausalLM"
        self.third = self.predicts_ahead = version == 3
        self.router = ROUTERS[self.kind]
        self.differs: dict[str, Any] = {"multi_latent_attention": True}

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        """As `Family.fits`."""
        softmax = bool(model.num_experts) and model.moe_router_score_function == "softmax"
        return model.multi_latent_attention and softmax != self.third

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        """As `Family.settings`."""

        def integer(name: str, least: int = 1) -> int:
            value = config.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise Refusal(f"{where}: {name} {value!r} of {self.kind} is not a whole number from {least}")
            return value

        for name, values in PLAIN.items():
            if config.get(name) is not None and config[name] not in values:
                raise Refusal(f"{where}: {name} {config[name]} of {self.kind} is not supported: only {values[0]}")
        if config.get("num_key_value_heads") not in (None, config.get("num_attention_heads")):
            raise Refusal(f"{where}: num_key_value_heads of {self.kind} is not num_attention_heads")
        rope = llama_settings.rope_settings(config, where)
        if rope.keys() - {"rotary_base"} and rope.get("position_embedding_type") != "yarn":
            raise Refusal(f"{where}: of {self.kind}, only rope_scaling of type yarn is supported")
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if given.get("mscale_all_dim") and given["mscale_all_dim"] != rope.get("yarn_mscale_all_dim"):
            raise Refusal(f"{where}: rope_scaling: mscale_all_dim goes with the same mscale and attention_factor")
        values: dict[str, Any] = {ours: integer(theirs) for theirs, ours in SIZES.items()}
        values["q_lora_rank"] = None if config.get("q_lora_rank") is None else integer("q_lora_rank")
        dense = integer("first_k_dense_replace", 0)
        experts = {} if dense >= values["num_layers"] else self.experts(config, where, dense, integer)
        model = ModelConfig(
            **(LLAMA | {"norm_epsilon": EPSILON} | values | experts | rope),
            multi_latent_attention=True,
            qk_layernorm=True,
        )
        model.untie_embeddings_and_output_weights = not config.get("tie_word_embeddings", False)
        return derive_shape(model), integer("vocab_size")

    def experts(self, config: dict[str, Any], where: object, dense: int, integer: Any) -> dict[str, Any]:
        """The settings of experts, which the first ``dense`` layers lack; ``integer`` reads a key."""
        layers, topk, width = (
            config["num_hidden_layers"],
            integer("num_experts_per_tok"),
            integer("moe_intermediate_size"),
        )
        factor = llama_settings.positive(config.get("routed_scaling_factor"), "routed_scaling_factor", where)
        groups: dict[str, Any] = {}
        v3 = self.third
        method = config.get("topk_method", "noaux_tc" if v3 else "greedy")
        if v3 or method == "group_limited_greedy":
            groups = {"moe_router_num_groups": integer("n_group"), "moe_router_group_topk": integer("topk_group")}
            # A group is as good as its topk / topk_group best experts here, its two best in V3, its best in V2.
            best, chosen = 2 if v3 else 1, groups["moe_router_group_topk"]
            if groups["moe_router_num_groups"] == chosen == 1:
                groups = {}
            elif topk != best * chosen:
                raise Refusal(
                    f"{where}: num_experts_per_tok {topk} is not {best} times topk_group {chosen}: not supported"
                )
        if (
            bool(config.get("norm_topk_prob", v3)) != v3
            or config.get("scoring_func", "sigmoid" if v3 else "softmax") != ("sigmoid" if v3 else "softmax")
            or method not in (("noaux_tc",) if v3 else ("greedy", "group_limited_greedy"))
            or (v3 and topk == 1)
        ):
            raise Refusal(
                f"{where}: norm_topk_prob, scoring_func, topk_method and num_experts_per_tok do not describe the "
                f"router of {self.title}"
            )
        return self.router | groups | {
            "num_experts": integer("n_routed_experts"),
            "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
            "moe_ffn_hidden_size": width,
            "moe_shared_expert_intermediate_size": width * integer("n_shared_experts"),
            "moe_router_topk": topk,
            "moe_router_topk_scaling_factor": factor,
            "moe_router_dtype": "fp32",
        }  # fmt: skip

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The config.json of a model with our settings. Raises Refusal if the model is not a DeepSeek."""
        fixed, layers = FIXED | (self.router if model.num_experts else {}), model.num_layers
        wrong = [name for name in fixed if getattr(model, name) != fixed[name]]
        if model.position_embedding_type not in ROTARY:
            wrong.append("position_embedding_type")
        if model.position_embedding_type == "yarn" and model.yarn_mscale_all_dim and not model.yarn_mscale:
            wrong.append("yarn_mscale")
        dense = expert_layers(model).index(1) if model.num_experts else layers
        if model.num_experts:
            wrong += self._wrong_router(model, dense)
        llama_settings.refuse_other_settings(model, wrong, self.title, self.architecture)
        scaling = llama_settings.scaling_json(model)
        if scaling and model.yarn_mscale_all_dim:
            del scaling["attention_factor"]  # as transformers computes it from mscale and mscale_all_dim
        result = {theirs: getattr(model, ours) for theirs, ours in SIZES.items()} | {
            "architectures": [self.architecture],
            "model_type": self.kind,
            "vocab_size": vocab_size,
            "num_key_value_heads": model.num_attention_heads,
            "q_lora_rank": model.q_lora_rank,
            "first_k_dense_replace": dense,
            "hidden_act": "silu",
            "rms_norm_eps": model.norm_epsilon,
            "rope_theta": float(model.rotary_base),
            "rope_scaling": scaling,
            "attention_bias": False,
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if self.third:
            result |= {"rope_interleave": True, "num_nextn_predict_layers": model.mtp_num_layers or 0}
        return result | self.router_json(model)

    def router_json(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json about experts."""
        if not model.num_experts:
            return {}
        result: dict[str, Any] = {
            "n_routed_experts": model.num_experts,
            "n_shared_experts": model.moe_shared_expert_intermediate_size // model.moe_ffn_hidden_size,
            "moe_intermediate_size": model.moe_ffn_hidden_size,
            "num_experts_per_tok": model.moe_router_topk,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "norm_topk_prob": self.third,
        }
        if self.third or model.moe_router_num_groups:
            result |= {"n_group": model.moe_router_num_groups or 1, "topk_group": model.moe_router_group_topk or 1}
        if not self.third:
            result["topk_method"] = "group_limited_greedy" if model.moe_router_num_groups else "greedy"
        return result

    def _wrong_router(self, model: ModelConfig, dense: int) -> list[str]:
        """Settings of experts that the router of this version cannot have."""
        wrong = [name for name in ("moe_expert_capacity_factor",) if getattr(model, name) is not None]
        if expert_layers(model) != [0] * dense + [1] * (model.num_layers - dense):
            wrong.append("moe_layer_freq")
        shared = model.moe_shared_expert_intermediate_size
        if not shared or shared % model.moe_ffn_hidden_size:
            wrong.append("moe_shared_expert_intermediate_size")
        v3 = self.third
        groups = model.moe_router_group_topk
        if (v3 and model.moe_router_topk == 1) or (groups and model.moe_router_topk != (2 if v3 else 1) * groups):
            wrong.append("moe_router_topk")
        return wrong

    def pieces(self, model: ModelConfig, vocab_size: int, names: Collection[str]) -> Iterator[Piece]:
        """All weights, layer by layer; if some layers have experts and others not, each layer's have their own name."""
        hidden, heads = model.hidden_size, model.num_attention_heads
        rotated, latent = model.qk_pos_emb_head_dim, model.kv_lora_rank
        yield Piece(EMBEDDING, (HF_EMBEDDING,), ((vocab_size, hidden),))
        for layer, place, stacked, experts in layers(model):

            def piece(
                ours: str,
                theirs: str,
                *shape: int,
                layer: int = layer,
                place: str = place,
                stacked: bool = stacked,
                part: tuple[int, int] = (0, 1),
                expert: tuple[int | None, int] = (None, 1),
                wide: bool = False,
            ) -> Piece:
                name = f"model.layers.{layer}.{theirs}"
                return Piece(place + ours, (name,), (shape,), layer, *part, *expert, stacked=stacked, wide=wide)

            ours, theirs, queries = "self_attention", "self_attn", heads * model.kv_channels
            yield piece("input_layernorm.weight", "input_layernorm.weight", hidden)
            if model.q_lora_rank is None:
                yield piece(f"{ours}.linear_q_proj.weight", f"{theirs}.q_proj.weight", queries, hidden)
            else:
                rank = model.q_lora_rank
                yield piece(f"{ours}.linear_q_down_proj.weight", f"{theirs}.q_a_proj.weight", rank, hidden)
                yield piece(f"{ours}.linear_q_up_proj.layer_norm_weight", f"{theirs}.q_a_layernorm.weight", rank)
                yield piece(f"{ours}.linear_q_up_proj.weight", f"{theirs}.q_b_proj.weight", queries, rank)
            down = f"{theirs}.kv_a_proj_with_mqa.weight"
            yield piece(f"{ours}.linear_kv_down_proj.weight", down, latent + rotated, hidden)
            yield piece(f"{ours}.linear_kv_up_proj.layer_norm_weight", f"{theirs}.kv_a_layernorm.weight", latent)
            up = heads * (model.qk_head_dim + model.v_head_dim)
            yield piece(f"{ours}.linear_kv_up_proj.weight", f"{theirs}.kv_b_proj.weight", up, latent)
            out = heads * model.v_head_dim
            yield piece(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", hidden, out)
            yield from self.ffn_pieces(model, piece, experts)
            yield from ahead_pieces(model, layer)
        yield Piece("decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),))
        if model.untie_embeddings_and_output_weights:
            yield Piece("output_layer.weight", (LM_HEAD,), ((vocab_size, hidden),))

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Tensors of the files that equal another one: of each layer of multi-token prediction, embedding and head."""
        head = LM_HEAD if model.untie_embeddings_and_output_weights else HF_EMBEDDING
        further = range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0))
        of_layer = {"embed_tokens": HF_EMBEDDING, "shared_head.head": head}
        return {f"model.layers.{layer}.{name}.weight": source for layer in further for name, source in of_layer.items()}

    def ffn_pieces(self, model: ModelConfig, piece: Any, experts: bool) -> Iterator[Piece]:
        """The weights of a layer after its attention, in a model with or without experts there.

        Args:
            piece: makes a piece of this layer, from our name, the name in the files, and the shape.
        """
        hidden = model.hidden_size

        def mlp(ours: str, theirs: str, width: int, **expert: Any) -> Iterator[Piece]:
            for part, name in enumerate(("gate_proj", "up_proj")):
                yield piece(
                    f"{ours}.linear_fc1.weight", f"{theirs}.{name}.weight", width, hidden, part=(part, 2), **expert
                )
            yield piece(f"{ours}.linear_fc2.weight", f"{theirs}.down_proj.weight", hidden, width, **expert)

        if not experts:
            yield piece("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", hidden)
            yield from mlp("mlp", "mlp", model.ffn_hidden_size)
            return
        yield piece("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden)
        yield piece("mlp.router.weight", "mlp.gate.weight", model.num_experts, hidden)
        if model.moe_router_enable_expert_bias:
            yield piece("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", model.num_experts, wide=True)
        yield from mlp("mlp.shared_experts", "mlp.shared_experts", model.moe_shared_expert_intermediate_size)
        for number in range(model.num_experts):
            expert = (number, model.num_experts)
            yield from mlp(EXPERTS, f"mlp.experts.{number}", model.moe_ffn_hidden_size, expert=expert)
