# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2, V3 and V3.2, and GLM-5: settings and weights in Hugging Face's format.

They are transformers' deepseek_v2, deepseek_v3, deepseek_v32 and glm_moe_dsa.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import Family, WithLlamaNames
from megatron.training.families.llama.llama_weights import EMBEDDING, EXPERTS, LM_HEAD, Piece, layers
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds.dsa_kind import chooses
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


class DeepSeek(WithLlamaNames):
    """V2 and V3, which differ in the router: V2 has a softmax, V3 sigmoids, groups of experts and a bias."""

    only, fixed = PLAIN, FIXED

    def __init__(self, version: int) -> None:
        self.kind, self.title = f"deepseek_v{version}", f"DeepSeek V{version}"
        self.architecture = f"DeepseekV{version}ForCausalLM"
        self.third = self.predicts_ahead = version == 3
        self.router = ROUTERS[self.kind]
        self.differs: dict[str, Any] = {"multi_latent_attention": True}

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        softmax = bool(model.num_experts) and model.moe_router_score_function == "softmax"
        return model.multi_latent_attention and softmax != self.third

    def further(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        """Our settings of attention besides those of latents."""
        return {}

    def further_pieces(self, model: ModelConfig, layer: int, piece: Any) -> Iterator[Piece]:
        """The weights of a layer's attention besides those of latents."""
        return iter(())

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        integer = self.integers(config, where)
        self.check_values(config, where, {name: (*values, None) for name, values in self.only.items()})
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
            **(LLAMA | {"norm_epsilon": EPSILON} | values | experts | rope | self.further(config, where)),
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
        fixed, layers = self.fixed | (self.router if model.num_experts else {}), model.num_layers
        wrong = [name for name in fixed if getattr(model, name) != fixed[name]]
        if model.position_embedding_type not in ROTARY:
            wrong.append("position_embedding_type")
        if model.position_embedding_type == "yarn" and model.yarn_mscale_all_dim and not model.yarn_mscale:
            wrong.append("yarn_mscale")
        dense = expert_layers(model).index(1) if model.num_experts else layers
        if model.num_experts:
            wrong += self._wrong_router(model, dense)
        self.refuse(model, wrong)
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

    def layer_pieces(self, model: ModelConfig) -> Iterator[Piece]:
        """All weights, layer by layer; if some layers have experts and others not, each layer's have their own name."""
        hidden, heads = model.hidden_size, model.num_attention_heads
        rotated, latent = model.qk_pos_emb_head_dim, model.kv_lora_rank
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
            yield from self.further_pieces(model, layer, piece)
            yield from self.ffn_pieces(model, piece, experts)
            yield from ahead_pieces(model, layer)

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """Tensors of the files that equal another one: of each layer of multi-token prediction, embedding and head."""
        head = LM_HEAD if model.untie_embeddings_and_output_weights else EMBEDDING
        further = range(model.num_layers, model.num_layers + (model.mtp_num_layers or 0))
        of_layer = {"embed_tokens": EMBEDDING, "shared_head.head": head}
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


SPARSE: dict[str, Any] = {"experimental_attention_variant": "dsa", "dsa_indexer_k_norm_epsilon": EPSILON}
INDEX_SIZES = {
    "index_n_heads": "dsa_indexer_n_heads",
    "index_head_dim": "dsa_indexer_head_dim",
    "index_topk": "dsa_indexer_topk",
}
INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}


class SparseDeepSeek(DeepSeek):
    """V3.2, which is V3 with queries that choose their keys, and GLM-5, where layers may share a choice."""

    stem = ""

    def __init__(self, kind: str, title: str, architecture: str, glm: bool = False) -> None:
        super().__init__(3)
        self.kind, self.title, self.architecture, self.glm = kind, title, architecture, glm
        self.differs = SPARSE | {"dsa_indexer_rope_interleaved": glm, "multi_latent_attention": True}
        self.fixed = FIXED | self.differs
        if glm:  # its latents' norms have another epsilon than its layers' norms
            self.only = {name: values for name, values in PLAIN.items() if name != "rms_norm_eps"}
            self.fixed = {name: value for name, value in self.fixed.items() if name != "norm_epsilon"}

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return Family.fits(self, model, attention)

    def further(self, config: dict[str, Any], where: object) -> dict[str, Any]:
        if config.get("q_lora_rank") is None:
            raise Refusal(f"{where}: q_lora_rank null of {self.kind} is not supported: the indexer reads this latent")
        dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
        if config.get("mlp_layer_types") not in (None, ["dense"] * dense + ["sparse"] * (layers - dense)):
            raise Refusal(f"{where}: mlp_layer_types are not those of first_k_dense_replace {dense}: not supported")
        result = {ours: llama_settings.whole(config.get(theirs), theirs, where) for theirs, ours in INDEX_SIZES.items()}
        result |= SPARSE | {"dsa_indexer_rope_interleaved": self.glm}
        if not self.glm:
            return result
        epsilon = llama_settings.positive(config.get("rms_norm_eps", 1e-5), "rms_norm_eps", where)
        return result | {"norm_epsilon": epsilon, "latent_norm_epsilon": EPSILON} | _sharing(config, layers, where)

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        result = super().config_json(model, vocab_size, dtype, attention)
        result |= {theirs: getattr(model, ours) for theirs, ours in INDEX_SIZES.items()}
        if self.glm:
            result["index_topk_freq"] = model.dsa_indexer_topk_freq
            result["index_skip_topk_offset"] = model.dsa_indexer_skip_topk_offset
            result["indexer_types"] = ["full" if own else "shared" for own in chooses(model)]
        return result

    def further_pieces(self, model: ModelConfig, layer: int, piece: Any) -> Iterator[Piece]:
        """As `DeepSeek.further_pieces`: the indexer, if the layer has one."""
        if layer < model.num_layers and not chooses(model)[layer]:
            return
        hidden, heads, dim = model.hidden_size, model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        shapes = (heads * dim, model.q_lora_rank), (dim, hidden), (dim,), (dim,), (heads, hidden)
        for (ours, theirs), shape in zip(INDEXER.items(), shapes):
            yield piece(f"self_attention.core_attention.indexer.{ours}", f"self_attn.indexer.{theirs}", *shape)


def _sharing(config: dict[str, Any], layers: int, where: object) -> dict[str, int]:
    """Our settings of which layers choose keys."""
    types, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    freq, offset = config.get("index_topk_freq"), config.get("index_skip_topk_offset", 2)
    given = [] if freq is None else [(freq, offset)]
    every = [(1, 0), *((freq, offset) for freq in range(2, layers + 1) for offset in range(1, layers + 1))]
    for freq, offset in given + every if types is not None else given or [(1, 0)]:
        if not all(isinstance(x, int) and not isinstance(x, bool) for x in (freq, offset)) or freq < 1 or offset < 0:
            raise Refusal(f"{where}: index_topk_freq {freq!r} and index_skip_topk_offset {offset!r} are not valid")
        found = {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset}
        own = ["full" if one else "shared" for one in chooses(ModelConfig(num_layers=layers, **found))]
        if types is None or own == list(types):
            return found if freq > 1 else {}
    raise Refusal(
        f"{where}: indexer_types {types} are not full for some layers at the start, and then for every n-th: not "
        "supported"
    )
