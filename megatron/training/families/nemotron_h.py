# SPDX-License-Identifier: Apache-2.0
"""Hybrids with Mamba2: Nemotron H, and models of Mamba2 layers alone (transformers' nemotron_h and mamba2).

In both, a layer has one norm and one mixer: a Mamba2 layer, attention without positions, an MLP or experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from megatron.training.families.deepseek import DeepSeek
from megatron.training.families.llama import llama_settings
from megatron.training.families.llama.family import Family
from megatron.training.families.llama.llama_weights import EXPERTS, Piece
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.kinds.hybrid_kind import MAMBA_WIDTH
from megatron.training.settings.kinds.layer_patterns import hybrid_pattern
from megatron.training.settings.models import derive_shape

EPSILON = 1e-5  # of the norm of a Mamba2 layer's outputs in core; in these files all norms have the same
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E", "mamba": "M", "attention": "*"}
EXPERTS_OF = DeepSeek(3)
UNLIMITED = (float("inf"), {"__float__": "Infinity"})  # as transformers 4 and 5 write it
# Our settings that every such model has.
FIXED = llama_settings.FIXED | {
    "is_hybrid_model": True, "position_embedding_type": "none", "norm_epsilon": EPSILON, "add_bias_linear": False,
    "swiglu": False, "squared_relu": True, "mtp_num_layers": None,
}  # fmt: skip
# Settings of layers that a model of Mamba2 layers alone does not have.
OF_OTHER_LAYERS = ("add_bias_linear", "add_qkv_bias", "swiglu", "squared_relu", "geglu", "quick_geglu", "qk_layernorm",
                   "glu_linear_offset", "softmax_type", "softmax_scale", "attn_logit_softcapping",
                   "attention_output_gate", "activation_func_clamp_value", "rotary_interleaved",
                   "qk_layernorm_all_heads", "position_embedding_type")  # fmt: skip


class Mamba2Alone(Family):
    """Mamba2 layers alone. Nemotron H has other sizes and values."""

    kind, title, architecture, stem = "mamba2", "Mamba2", "Mamba2ForCausalLM", ""
    differs: dict[str, Any] = {"is_hybrid_model": True}
    fixed = {name: value for name, value in FIXED.items() if name not in OF_OTHER_LAYERS}
    sizes = {
        "hidden_size": "hidden_size", "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim",
        "state_size": "mamba_state_dim", "n_groups": "mamba_num_groups",
    }  # fmt: skip
    # Keys of config.json that may only have these values; the first is written. transformers adds layers in fp32 if
    # residual_in_fp32; here they are added in the dtype of the run.
    plain: dict[str, tuple[Any, ...]] = {
        "layer_norm_epsilon": (EPSILON,), "conv_kernel": (MAMBA_WIDTH,), "use_conv_bias": (True,),
        "use_bias": (False,), "hidden_act": ("silu",), "residual_in_fp32": (True, False),
        "quantization_config": (None,),
    }  # fmt: skip

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return model.is_hybrid_model and set(hybrid_pattern(model)) == {"M"}

    def settings(self, config: dict[str, Any], where: object) -> tuple[ModelConfig, int]:
        self.check_keys(config, where, "vocab_size", sizes=self.sizes)
        self.check_values(config, where, self.plain)
        integer = self.integers(config, where)
        own: dict[str, Any] = {ours: integer(theirs) for theirs, ours in self.sizes.items()}
        heads, groups = own["mamba_num_heads"], own["mamba_num_groups"]
        if heads % groups:
            raise Refusal(f"{where}: n_groups {groups} of {self.kind} does not divide the {heads} heads of Mamba2")
        pattern = self.pattern(config, where)
        model = ModelConfig(
            **(FIXED | own | self.others(config, where, pattern, integer)),
            num_layers=len(pattern),
            hybrid_override_pattern=pattern,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            mamba_dt_min=self.smallest_step(config, where),
        )
        return derive_shape(model), integer("vocab_size")

    def pattern(self, config: dict[str, Any], where: object) -> str:
        """A letter for each layer."""
        return "M" * llama_settings.whole(config.get("num_hidden_layers"), "num_hidden_layers", where)

    def smallest_step(self, config: dict[str, Any], where: object) -> float:
        """The lower limit of time steps."""
        limits = config.get("time_step_limit", (0.0, UNLIMITED[0]))
        if not isinstance(limits, (list, tuple)) or len(limits) != 2 or limits[1] not in UNLIMITED:
            raise Refusal(f"{where}: time_step_limit {limits!r} of {self.kind} is not supported: only [x, Infinity]")
        return limits[0] and llama_settings.positive(limits[0], "time_step_limit", where)

    def others(self, config: dict[str, Any], where: object, pattern: str, integer: Any) -> dict[str, Any]:
        """The settings that Nemotron H does not share. Of attention, sizes are needed that no layer reads."""
        if (inner := config["num_heads"] * config["head_dim"]) != (
            width := config.get("expand", 2) * config["hidden_size"]
        ):
            raise Refusal(f"{where}: num_heads x head_dim {inner} of mamba2 is not expand x hidden_size {width}")
        return {
            "num_attention_heads": config["num_heads"],
            "kv_channels": config["head_dim"],
            "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        }

    def config_json(
        self, model: ModelConfig, vocab_size: int, dtype: torch.dtype, attention: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        wrong = [name for name in self.fixed if getattr(model, name) != self.fixed[name]]
        self.refuse(model, wrong + self.wrong(model))
        return {
            "model_type": self.kind,
            "architectures": [self.architecture],
            "vocab_size": vocab_size,
            "num_hidden_layers": model.num_layers,
            **{theirs: getattr(model, ours) for theirs, ours in self.sizes.items()},
            **{name: values[0] for name, values in self.plain.items() if values[0] is not None},
            **self.others_json(model),
            "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }

    def wrong(self, model: ModelConfig) -> list[str]:
        """Further settings that the family cannot have."""
        wrong = [] if set(hybrid_pattern(model)) == {"M"} else ["hybrid_override_pattern"]
        inner = model.mamba_num_heads * model.mamba_head_dim
        return wrong + ([] if inner % model.hidden_size == 0 else ["mamba_num_heads", "mamba_head_dim"])

    def others_json(self, model: ModelConfig) -> dict[str, Any]:
        """The keys of config.json that Nemotron H does not have."""
        limit = {"time_step_limit": [model.mamba_dt_min, UNLIMITED[0]]} if model.mamba_dt_min else {}
        return limit | {"expand": model.mamba_num_heads * model.mamba_head_dim // model.hidden_size}

    def pieces(self, model: ModelConfig, vocab_size: int, names: Collection[str]) -> Iterator[Piece]:
        """All weights, layer by layer; each layer's have their own name. ``names``: the tensors in the files."""
        hidden = model.hidden_size
        base = "model" if "model.embeddings.weight" in names else "backbone"
        yield Piece("embedding.word_embeddings.weight", (f"{base}.embeddings.weight",), ((vocab_size, hidden),))
        for layer, kind in enumerate(hybrid_pattern(model)):
            for piece in _PARTS[kind](model):
                yield replace(
                    piece,
                    key=f"decoder.layers.{layer}.{piece.key}",
                    names=tuple(f"{base}.layers.{layer}.{name}" for name in piece.names),
                    layer=layer,
                    stacked=False,
                )
        yield Piece("decoder.final_norm.weight", (f"{base}.norm_f.weight",), ((hidden,),))
        if model.untie_embeddings_and_output_weights:
            yield Piece("output_layer.weight", ("lm_head.weight",), ((vocab_size, hidden),))


class NemotronH(Mamba2Alone):
    """Nemotron H: experts are those of DeepSeek V3; in transformers, time_step_min is the lower limit of steps."""

    kind, title, architecture = "nemotron_h", "Nemotron H", "NemotronHForCausalLM"
    fixed = FIXED | {"untie_embeddings_and_output_weights": True}
    sizes = {
        "hidden_size": "hidden_size", "intermediate_size": "ffn_hidden_size",
        "num_attention_heads": "num_attention_heads", "num_key_value_heads": "num_query_groups",
        "head_dim": "kv_channels", "max_position_embeddings": "max_position_embeddings",
        "mamba_num_heads": "mamba_num_heads", "mamba_head_dim": "mamba_head_dim", "ssm_state_size": "mamba_state_dim",
        "n_groups": "mamba_num_groups",
    }  # fmt: skip
    plain = {name: values for name, values in Mamba2Alone.plain.items() if name != "hidden_act"} | {
        "residual_in_fp32": (False,), "mamba_hidden_act": ("silu",), "mlp_hidden_act": ("relu2",),
        "attention_bias": (False,), "mlp_bias": (False,), "mamba_proj_bias": (False,), "hidden_dropout": (0.0,),
        "sliding_window": (None,), "moe_latent_size": (None,), "num_nextn_predict_layers": (0, None),
        "tie_word_embeddings": (False,),
    }  # fmt: skip
    older = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias",
             "mamba_dt_min": "time_step_min", "mamba_dt_limit": "time_step_limit"}  # fmt: skip

    def fits(self, model: ModelConfig, attention: dict[str, Any]) -> bool:
        return model.is_hybrid_model and not super().fits(model, attention)

    def pattern(self, config: dict[str, Any], where: object) -> str:
        """From the list of kinds, or without one from the letters that older files have."""
        for name, newer in self.older.items():
            if name in config:
                raise Refusal(f"{where}: {name} is an older name of {newer}: rename it")
        kinds, letters = config.get("layers_block_type", config.get("layer_types")), None
        if kinds is None:
            letters = config.get("hybrid_override_pattern")
        elif isinstance(kinds, list):
            letters = "".join(LETTERS.get(kind, "?") if isinstance(kind, str) else "?" for kind in kinds)
        if not isinstance(letters, str) or not letters or set(letters) - set(LETTERS.values()):
            raise Refusal(
                f"{where}: layers_block_type {kinds!r} and hybrid_override_pattern of nemotron_h do not say for each "
                "layer whether it is mamba, attention, mlp or moe"
            )
        if config.get("num_hidden_layers", len(letters)) != len(letters):
            raise Refusal(
                f"{where}: num_hidden_layers {config['num_hidden_layers']!r} is not the number of layers in "
                f"layers_block_type, {len(letters)}"
            )
        return letters

    def smallest_step(self, config: dict[str, Any], where: object) -> float:
        """transformers does not read time_step_limit, so it must be none."""
        if super().smallest_step(config, where):
            raise Refusal(
                f"{where}: time_step_limit {config['time_step_limit']!r} of nemotron_h is not supported: only "
                "[0.0, Infinity]"
            )
        step = config.get("time_step_min", 0.001)
        return step and llama_settings.positive(step, "time_step_min", where)

    def others(self, config: dict[str, Any], where: object, pattern: str, integer: Any) -> dict[str, Any]:
        """Groups of query heads, and experts."""
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        if heads % groups:
            raise Refusal(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
        own: dict[str, Any] = {"group_query_attention": heads != groups, "untie_embeddings_and_output_weights": True}
        if "E" in pattern:
            known = config | {"num_hidden_layers": 1, "n_shared_experts": 1}  # transformers reads neither
            own |= EXPERTS_OF.experts(known, where, 0, lambda name: 1 if name == "n_shared_experts" else integer(name))
            own["moe_shared_expert_intermediate_size"] = integer("moe_shared_expert_intermediate_size")
        return own

    def wrong(self, model: ModelConfig) -> list[str]:
        """Settings of experts that the router cannot have."""
        if not model.num_experts:
            return []
        wrong = [name for name, value in EXPERTS_OF.router.items() if getattr(model, name) != value]
        wrong += [name for name in ("moe_expert_capacity_factor", "moe_shared_expert_gate") if getattr(model, name)]
        if not model.moe_shared_expert_intermediate_size:
            wrong.append("moe_shared_expert_intermediate_size")
        best = 2 * (model.moe_router_group_topk or 0)
        return wrong + ["moe_router_topk"] * (model.moe_router_topk == 1 or best not in (0, model.moe_router_topk))

    def others_json(self, model: ModelConfig) -> dict[str, Any]:
        """Letters of the layers, the smallest time step, and experts."""
        experts = {}
        if model.num_experts:
            shared = model.moe_shared_expert_intermediate_size
            experts = EXPERTS_OF.router_json(model)
            experts |= {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": shared}
        return experts | {"hybrid_override_pattern": hybrid_pattern(model), "time_step_min": model.mamba_dt_min}


def _mamba(model: ModelConfig) -> Iterator[Piece]:
    hidden, heads, groups = model.hidden_size, model.mamba_num_heads, model.mamba_num_groups
    values, keys = heads * model.mamba_head_dim, groups * model.mamba_state_dim
    rows = (("z", values), ("x", values), ("B", keys), ("C", keys), ("dt", heads))
    convolved = rows[1:4]
    yield Piece("mixer.in_proj.layer_norm_weight", ("norm.weight",), ((hidden,),))
    shape = sum(count for _, count in rows), hidden
    yield Piece("mixer.in_proj.weight", ("mixer.in_proj.weight",), (shape,), named=rows)
    channels = values + 2 * keys
    for name, shape in (("weight", (channels, 1, MAMBA_WIDTH)), ("bias", (channels,))):
        yield Piece(f"mixer.conv1d.{name}", (f"mixer.conv1d.{name}",), (shape,), named=convolved)
    for name in ("dt_bias", "A_log", "D"):
        yield Piece(f"mixer.{name}", (f"mixer.{name}",), ((heads,),))
    yield Piece("mixer.norm.weight", ("mixer.norm.weight",), ((values,),))
    yield Piece("mixer.out_proj.weight", ("mixer.out_proj.weight",), ((hidden, values),))


def _attention(model: ModelConfig) -> Iterator[Piece]:
    hidden, size = model.hidden_size, model.kv_channels
    queries, keys = model.num_attention_heads * size, model.num_query_groups * size
    qkv = tuple(f"mixer.{name}_proj.weight" for name in "qkv")
    yield Piece("self_attention.linear_qkv.layer_norm_weight", ("norm.weight",), ((hidden,),))
    yield Piece("self_attention.linear_qkv.weight", qkv, ((queries, hidden), (keys, hidden), (keys, hidden)))
    yield Piece("self_attention.linear_proj.weight", ("mixer.o_proj.weight",), ((hidden, queries),))


def _mlp(model: ModelConfig) -> Iterator[Piece]:
    yield Piece("mlp.linear_fc1.layer_norm_weight", ("norm.weight",), ((model.hidden_size,),))
    yield from _matrices(model, "mlp", "mixer", model.ffn_hidden_size)


def _experts(model: ModelConfig) -> Iterator[Piece]:
    hidden, experts = model.hidden_size, model.num_experts
    yield Piece("pre_mlp_layernorm.weight", ("norm.weight",), ((hidden,),))
    yield Piece("mlp.router.weight", ("mixer.gate.weight",), ((experts, hidden),))
    bias = ("mixer.gate.e_score_correction_bias",)
    yield Piece("mlp.router.expert_bias", bias, ((experts,),), wide=True)
    shared = model.moe_shared_expert_intermediate_size
    yield from _matrices(model, "mlp.shared_experts", "mixer.shared_experts", shared)
    for number in range(experts):
        for piece in _matrices(model, EXPERTS, f"mixer.experts.{number}", model.moe_ffn_hidden_size):
            yield replace(piece, expert=number, experts=experts)


def _matrices(model: ModelConfig, ours: str, theirs: str, width: int) -> Iterator[Piece]:
    yield Piece(f"{ours}.linear_fc1.weight", (f"{theirs}.up_proj.weight",), ((width, model.hidden_size),))
    yield Piece(f"{ours}.linear_fc2.weight", (f"{theirs}.down_proj.weight",), ((model.hidden_size, width),))


_PARTS = {"M": _mamba, "*": _attention, "-": _mlp, "E": _experts}
