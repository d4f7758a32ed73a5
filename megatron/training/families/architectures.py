# SPDX-License-Identifier: Apache-2.0
"""The table FAMILIES: Hugging Face models that --load reads and tools/convert_hf.py converts in both directions.

A model that differs from a Llama only in our settings, such as Qwen, is one line of the table; any other has a file
with a :class:`Family`, like olmo.py, and a line. `--model hf:DIR` reads its settings from the same table.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import torch

from megatron.training.families.deepseek import DeepSeek, SparseDeepSeek
from megatron.training.families.gemma import Gemma
from megatron.training.families.glm import Glm
from megatron.training.families.gpt_oss import GptOss
from megatron.training.families.llama.family import Family
from megatron.training.families.llama.llama_like import BIASES, LlamaLike, WithExperts
from megatron.training.families.llama.llama_weights import LM_HEAD, ExpertNames, Piece
from megatron.training.families.nemotron_h import Mamba2Alone, NemotronH
from megatron.training.families.older_gpts import BLOOM, GPT2, GPT_NEOX
from megatron.training.families.olmo import Olmo
from megatron.training.families.qwen3_next import Qwen3Next
from megatron.training.families.recent_llamas import ERNIE, GRANITE, SMOLLM3, Exaone4
from megatron.training.refusal import Refusal
from megatron.training.settings.config import ModelConfig
from megatron.training.settings.same_network import differences, of_model
from megatron.training.untrusted.largest_numbers import MOST_PIECES

IGNORED = ".rotary_emb.inv_freq"  # old checkpoints hold RoPE's frequencies, which follow from config.json
LABELS = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
# From the general to the special: a model of ours is of the last family whose settings it has.
FAMILIES: dict[str, Family] = {
    family.kind: family
    for family in (
        LlamaLike("llama", "Llama", "LlamaForCausalLM", biases=BIASES),
        LlamaLike("mistral", "Mistral", "MistralForCausalLM", window="all"),
        LlamaLike("phi3", "Phi-3", "Phi3ForCausalLM", joined=True, window="all"),
        LlamaLike("qwen2", "Qwen 2", "Qwen2ForCausalLM", {"add_qkv_bias": True}, window="layers", switched=True),
        LlamaLike("qwen3", "Qwen 3", "Qwen3ForCausalLM", {"qk_layernorm": True}, window="layers", switched=True),
        ERNIE,
        GRANITE,
        SMOLLM3,
        WithExperts("mixtral", "Mixtral", "MixtralForCausalLM", only={"router_jitter_noise": 0.0}, window="all"),
        WithExperts(
            "qwen3_moe",
            "Qwen 3 with experts",
            "Qwen3MoeForCausalLM",
            {"qk_layernorm": True},
            window="all",
            switched=True,
            mixed=True,
            number="num_experts",
            width="moe_intermediate_size",
            names=ExpertNames(),
        ),
        BLOOM,
        GPT2,
        GPT_NEOX,
        Gemma("gemma2", "Gemma 2", "Gemma2ForCausalLM", third=False),
        Gemma("gemma3_text", "Gemma 3", "Gemma3ForCausalLM", third=True),
        Glm(),
        GptOss(),
        DeepSeek(2),
        DeepSeek(3),
        SparseDeepSeek("deepseek_v32", "DeepSeek V3.2", "DeepseekV32ForCausalLM"),
        SparseDeepSeek("glm_moe_dsa", "GLM-5", "GlmMoeDsaForCausalLM", glm=True),
        Olmo(2),
        Olmo(3),
        Exaone4(),
        Qwen3Next(),
        NemotronH(),
        Mamba2Alone(),
    )
}


class Described(NamedTuple):
    """A model as its config.json describes it."""

    settings: ModelConfig
    vocab_size: int
    family: Family
    attention: dict[str, Any] = {}  # settings of AttentionConfig


def described(config: dict[str, Any], where: object) -> Described:
    """Our settings for a config.json. Raises Refusal if the model is not supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        *others, last = FAMILIES
        raise Refusal(f"{where}: model_type {kind!r} is not supported: only {', '.join(others)} and {last}")
    family = FAMILIES[kind]
    classifier, given = family.classifier, config.get("architectures")
    if given not in (None, [family.architecture], [classifier]) or given == [""]:
        others = f" or {classifier}" if classifier else ""
        raise Refusal(f"{where}: architectures {given} is not supported: only {family.architecture}{others}")
    model, vocab_size = family.settings(config, where)
    if given == [classifier]:
        labels = config.get("id2label")
        if not isinstance(labels, dict) or len(labels) != 1:
            count = len(labels) if isinstance(labels, dict) else 2
            raise Refusal(f"{where}: a {classifier} of {count} labels is not supported: only reward models, with one")
        model = replace(model, reward_model=True)
    return Described(model, vocab_size, family, family.attention(config, where))


def family_of(model: ModelConfig, attention: dict[str, Any] | None = None) -> Family:
    """The family whose settings the model has; its ``config_json`` may still refuse it.

    Args:
        attention: settings of :class:`AttentionConfig`; OLMo 3 and Mistral may have a window, OLMo 2 and Llama not.
    """
    return next(
        (family for family in reversed(FAMILIES.values()) if family.fits(model, attention or {})), FAMILIES["llama"]
    )


def config_json(model: Described, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model of ours, from which its network can be read again.

    Raises:
        Refusal: transformers' class of the family has no such network; the message names the settings.
    """
    settings, vocab_size, family, attention = model
    written = family.config_json(settings, vocab_size, dtype, attention)
    if settings.reward_model:
        if not family.classifier:
            raise Refusal(f"transformers has no reward models of the family {family.title}")
        written |= {"architectures": [family.classifier], **LABELS}
    again = described(written, f"the config.json of a {family.title}")
    own = replace(settings, mtp_num_layers=None)  # later tokens are trained or left out, but are not read again
    places = (f"in Hugging Face's {family.architecture}", "in the model")
    lost = differences(of_model(again.settings, again.attention), of_model(own, attention), places)
    if any(lost):
        raise Refusal(f"the model is not a {family.title}: {'; '.join(lost.weights + lost.function)}")
    return written


def pieces(model: Described, names: Collection[str]) -> list[Piece]:
    """All weights of the model; ``names``: the tensors in the files (BLOOM's may have a prefix).

    Raises:
        Refusal: there are more than any model has.
    """
    found = list(islice(model.family.pieces(model.settings, model.vocab_size, names), MOST_PIECES + 1))
    if model.settings.reward_model:
        found = [piece for piece in found if piece.key != "output_layer.weight"]
        found.append(Piece("reward_head.weight", ("score.weight",), ((1, model.settings.hidden_size),)))
    if len(found) > MOST_PIECES:
        raise Refusal(f"the settings of the {model.family.title} require more than {MOST_PIECES:,} weights")
    return found


def is_ignored(model: Described, name: str) -> bool:
    """Whether transformers ignores a tensor of the files. Conversion keeps it for the way back."""
    if name.endswith((IGNORED, *model.family.ignored)):
        return True
    layer = re.match(r"model\.layers\.(\d{1,6})\.", name) if model.family.predicts_ahead else None
    return layer is not None and int(layer[1]) >= model.settings.num_layers + (model.settings.mtp_num_layers or 0)


def copies(model: Described, pieces: list[Piece]) -> dict[str, str]:
    """Tensors that the files may hold although they equal another one: for each, the name of the other."""
    settings = model.settings
    tied = (
        {} if settings.untie_embeddings_and_output_weights or settings.reward_model else {LM_HEAD: pieces[0].names[0]}
    )
    return tied | model.family.copies(model.settings)
