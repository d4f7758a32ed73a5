# SPDX-License-Identifier: Apache-2.0
"""A small random model of any family that transformers registers as a decoder, made from its configuration class alone.

Numbers in a configuration are reduced according to their names; OWN has the exceptions.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import megatron.context_parallel as cp
from megatron.context_parallel.huggingface import parallelize
from tests.errors import change_last_bits, worst
from tests.hugging_face import LENGTH, VOCABULARY, Outcome, averaged, draw_weights, errors, take_grads, whole_batch

FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LARGEST = 8_000_000  # parameters; a model with more was not made small
# The value for a field is that of the first pattern that matches its name.
SMALL: list[tuple[str, float | int]] = [
    (r"dropout|pdrop|layerdrop|jitter|drop_path", 0.0),
    (r"vocab", VOCABULARY),
    (r"^pad_(token_)?id|^pad_index", 0),
    (r"^bos_(token_)?id|^bos_index", 1),
    (r"^eos_(token_)?id|^eos_index", 2),
    (r"tokens?_(id|index)$|_start_id$", VOCABULARY - 1),
    (r"per_tok(en)?$|top_?k$|^moe_k$", 2),
    (r"shared_experts$|num_experts_shared", 1),
    (r"experts?$|num_experts|expert_num$", 4),
    (r"topk_group|nextn|hidden_layers_mtp", 1),
    (r"^n_group$|num_expert_group|kv_n?_?heads|key_value_heads|num_key_heads|kv_heads", 2),
    (r"^n?_?groups$|ngroups$|n_groups$|query_groups", 2),
    (r"lora_rank|_rank$|lowrank", 12),
    (r"qk_nope_head_dim|v_head_dim", 8),
    (r"qk_rope_head_dim", 4),
    (r"qk_head_dim", 12),
    (r"index_n_heads", 16),  # with few, many scores are exactly 0, and transformers chooses some of the equal keys
    (r"head_dim|d_head$|head_size$|kv_channels|headdim|dim_head|d_kv|rel$", 8),
    (r"heads?$|attention_heads$|n_head$|heads_per", 4),
    (r"rotary_dim", 4),
    (r"position|max_seq_len|context_length|n_ctx|model_max_length|rel_extent", 128),
    (r"sliding_window_pattern|attn_every|layer_interval|period|layer_group_size|sparse_step", 2),
    (r"sliding_window|attention_chunk_size|window_size|window_len|local_attention", 8),
    (r"index_block_size|index_n|block_size", 4),
    (r"chunk_size$", 8),
    (r"first_k_dense|num_dense_layers|layer_start_index|layer_offset|first_layer", 1),
    (r"layer_end_index", 1),
    (r"kv_shared_layers", 1),
    (r"ffn|intermediate|d_inner|dff|dim_ff|feed_forward|adapter_(in|out)|mlp_dim|n_inner", 48),
    (r"state_size|d_state|d_conv|conv_kernel|conv1d", 4),
    (r"hidden_size|d_model|embd?$|embed(ding)?_(dim|size)|emb_dim|_dim$|lru_width|n_embd|hidden_dim|embed_proj", 32),
    (r"layers?$|depth|num_blocks|_cycles", 2),
]  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
SWA = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "head_dim": 12,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
QSA = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2
}  # fmt: skip
WIDE = 64  # numbers up to this that match no pattern are kept
EXPERTS = {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1}
IF_NONE = EXPERTS | {"head_dim": 8, "num_key_value_heads": 2}  # for fields whose default is None in some families
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64}
OWN: dict[str, dict[str, Any]] = {
    "bamba": MAMBA,
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_text": {f"swa_{name}": small for name, small in SWA.items()},
    "falcon_h1": MAMBA,
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2, "index_n_heads": 2,
        "index_topk_blocks": 2, "rotary_dim": 4,
    },
    "prophetnet": {"num_buckets": 32, "relative_max_distance": 128},
    "qwen4_exp": QSA,
    "qwen4_exp_text": QSA,
    "reformer": {"axial_pos_shape": [8, 6], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local", "lsh"]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64},
    "zaya": {"num_experts_per_tok": 1},
}


def small_model(family: str) -> PreTrainedModel:
    """A random model in evaluation mode whose weights all affect its output. Raises ValueError if it stays large."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[family](**small_config(CONFIG_MAPPING[family]))
    config._attn_implementation = "eager"
    with torch.device("meta"):
        size = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters are left after making it small")
    return draw_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval())


def small_config(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """The arguments for a configuration class."""
    usual = kind()
    fields = {x.name: vars(usual).get(x.name) for x in dataclasses.fields(kind)}
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if name in kind.sub_configs and isinstance(value, PreTrainedConfig):
            made[name] = small_config(type(value))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            made[name] = smaller(name, value)
    made |= fewer_layers(usual, fields)
    made |= {"use_cache": False, "tie_word_embeddings": False, "is_decoder": True}
    made |= {name: small for name, small in IF_NONE.items() if name not in made}
    if "qk_rope_head_dim" in fields:
        made["num_key_value_heads"] = 4
    made = {name: value for name, value in made.items() if name in fields}
    return made | OWN.get(kind.model_type, {})


def smaller(name: str, value: float) -> float:
    if value in (0, None) and not re.search("drop|token_id", name):
        return value
    for pattern, small in SMALL:
        if re.search(pattern, name):
            return type(value)(small)
    return value if isinstance(value, float) or value <= WIDE else 16


def fewer_layers(usual: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """One layer of each kind, at least two, and the lists of their kinds."""
    count = getattr(usual, "num_hidden_layers", None)
    lists = {name: value for name, value in fields.items() if isinstance(value, (list, tuple)) and len(value) == count}
    if not lists or not isinstance(count, int):
        return {}
    kinds = list(zip(*lists.values()))
    chosen = sorted({kinds.index(kind) for kind in kinds})
    chosen = sorted({*chosen, 0, 1})[:6] if len(chosen) < 2 else chosen[:6]
    name = usual.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return {name: len(chosen)} | {key: [value[i] for i in chosen] for key, value in lists.items()}


# The outcome of a family over ranks: the results of one process, or a refusal with a correct reason.


LIMIT = 1e-5  # of the largest entry, in fp32
ROUNDINGS = 4  # larger errors are allowed up to this factor times the effect of rounding the weights


def outcome(family: str, ulysses: int = 2, ring: int = 2) -> dict[str, Any]:
    """The result on the first rank: a dictionary with ``outcome``, and ``error`` if this is parity, otherwise ``why``.

    A refusal also has ``true``: whether its reason is correct.
    """
    first = dist.get_rank() == 0
    batch = whole_batch()
    batch["input_ids"] = batch["input_ids"] % 80 + 3  # special tokens (images, sounds, padding) have other ids
    batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["input_ids"])
    try:
        model = small_model(family)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is why
        return {"outcome": "not buildable", "why": message(error)}
    try:
        context = parallelize(model, cp.initialize_grid(ulysses=ulysses, ring=ring), seq_length=LENGTH)
        inputs = context.shard({name: x for name, x in batch.items() if name != "labels"})
        with torch.no_grad():
            logits = context.gather(model(**inputs).logits, inputs)
        loss = model(**context.shard(batch)).loss
        loss.backward()
        grads = averaged(take_grads(model), context.grid.context.group)
        context.remove()
    except ValueError as error:
        true = is_true(str(error), small_model(family)) if first else None
        return {"outcome": "refused", "why": message(error), "true": true}
    except Exception as error:  # noqa: BLE001 - it is what the check searches for
        return {"outcome": "crash", "why": message(error)}
    if not first:
        return {}
    try:
        expected = by_document(model, batch)
    except Exception as error:  # noqa: BLE001
        return {"outcome": "not buildable", "why": message(error)}
    if missing := set(expected.grads) ^ set(grads):
        return {"outcome": "wrong", "why": f"gradients of {sorted(missing)[0]} and {len(missing) - 1} more"}
    result = errors(Outcome(logits, loss.detach(), grads), expected)
    name = max(result, key=result.get)
    worst_one = worst(result.values())
    if not worst_one < LIMIT and not worst_one < ROUNDINGS * worst(last_bit(family, batch, expected)):
        return {"outcome": "wrong", "why": f"{name} by {result[name]:.1e}", "loss": result["loss"]}
    return {"outcome": "parity", "error": result[name]}


def by_document(model: PreTrainedModel, batch: dict[str, Tensor]) -> Outcome:
    """Results of transformers for each document alone."""
    tokens, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
    rows = []
    for row in range(tokens.size(0)):
        starts = [*torch.nonzero(positions[row] == 0).flatten().tolist(), tokens.size(1)]
        parts = [model(input_ids=tokens[row : row + 1, a:b]).logits for a, b in zip(starts, starts[1:])]
        rows.append(torch.cat(parts, dim=1))
    logits = torch.cat(rows)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    total.backward()
    return Outcome(logits.detach(), total.detach(), take_grads(model))


def last_bit(family: str, batch: dict[str, Tensor], expected: Outcome) -> Iterable[float]:
    """Change of the results on one process if each weight changes by about its last bit."""
    model = small_model(family)
    change_last_bits(model.parameters())
    return errors(by_document(model, batch), expected).values()


def message(error: BaseException) -> str:
    """The error's text in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"[:300]


# Checks on one process with transformers alone that a refusal's reason is true.
# They replace transformers' attention by a function that computes the same and records the model's masks. Some
# also compare the logits before and after one token is changed.


RECORDER = "records_attention_calls"
TOKENS = torch.arange(3, 27)[None]
PLACE = 8  # of the token that is changed


def is_true(why: str, model: PreTrainedModel) -> bool | None:
    """Whether a refusal's reason is true; None: unknown."""
    return next((check(model, match) for pattern, check in CHECKS if (match := re.search(pattern, why))), None)


@dataclass
class Seen:
    """Calls of a model's attention.

    Attributes:
        masks: [q, k] of each call, True where a query sees a key; None: none was given.
        altered: attention got a mask that transformers did not make.
        ruled: a mask was made with a rule in addition to the causal one.
    """

    masks: list[Tensor | None] = field(default_factory=list)
    altered: bool = False
    ruled: bool = False


def observe(model: PreTrainedModel, tokens: Tensor, alone: bool = False, **given: Any) -> tuple[Tensor, Seen]:
    """Logits of transformers' forward, and the record; ``alone``: in attention each token sees only itself."""
    seen, made = Seen(), []

    def mask_of(*args: Any, **kwargs: Any) -> Tensor:
        seen.ruled |= kwargs.get("use_vmap", False) or not kwargs.get("allow_is_causal_skip", True)
        made.append(eager_mask(*args, **kwargs))
        return made[-1]

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **others: Any) -> Any:
        mask = attention_mask
        seen.masks.append(None if mask is None else mask[0, 0] > -1)
        seen.altered |= not any(mask is x for x in made)
        if alone:
            mask = torch.full((q.size(2), k.size(2)), -math.inf).fill_diagonal_(0)[None, None]
        return sdpa_attention_forward(module, q, k, v, mask, scaling=others.get("scaling"), is_causal=False)

    AttentionInterface.register(RECORDER, attend)
    AttentionMaskInterface.register(RECORDER, mask_of)
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDER)
    try:
        with torch.no_grad():
            return model(input_ids=tokens, **given).logits, seen
    finally:
        model.set_attn_implementation(before)


def moved(before: Tensor, after: Tensor) -> Tensor:
    """[s]: tokens whose logits [1, s, vocabulary] differ by more than rounding."""
    return (before - after).abs().amax(dim=(0, 2)) > 1e-4 * before.abs().max()


def changed(tokens: Tensor) -> Tensor:
    return tokens.index_fill(1, torch.tensor(PLACE), 50)


def tokens_mix(model: PreTrainedModel, _: re.Match) -> bool:
    """A token changes outputs of other tokens, although in attention each token sees only itself."""
    others = moved(*(observe(model, tokens, alone=True)[0] for tokens in (TOKENS, changed(TOKENS))))
    return bool(others.index_fill(0, torch.tensor(PLACE), False).any())


def mask_is_neither(model: PreTrainedModel, _: re.Match) -> bool:
    """A call of attention has no mask, or one that is neither causal nor a causal window."""
    far = torch.arange(TOKENS.size(1))[:, None] - torch.arange(TOKENS.size(1))
    windows = [(far >= 0) & (far < width) for width in range(1, TOKENS.size(1) + 1)]
    masks = observe(model, TOKENS)[1].masks
    return any(mask is None or not any(torch.equal(mask, window) for window in windows) for mask in masks)


def mask_is_altered(model: PreTrainedModel, _: re.Match) -> bool:
    """A call of attention has a mask that transformers' functions did not make, or attention is never called."""
    seen = observe(model, TOKENS)[1]
    return seen.altered or not seen.masks


def mask_is_ruled(model: PreTrainedModel, _: re.Match) -> bool:
    return observe(model, TOKENS)[1].ruled


def selects_keys(model: PreTrainedModel, _: re.Match) -> bool:
    """Outputs change if the model's indexers select all keys."""
    with torch.no_grad():
        before = model(TOKENS).logits
        for module in model.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = 2 * TOKENS.size(1)
        return bool(moved(before, model(TOKENS).logits).any())


def own_attention(model: PreTrainedModel, match: re.Match) -> bool:
    """The named module does not call the function from AttentionInterface."""
    named = next(type(module) for module in model.modules() if type(module).__name__ == match[1])
    return "ALL_ATTENTION_FUNCTIONS.get_interface(" not in inspect.getsource(sys.modules[named.__module__])


def goes_by_place(model: PreTrainedModel, _: re.Match) -> bool:
    """Outputs change if two tokens are exchanged with their positions, although each token sees only itself."""
    order = torch.arange(TOKENS.size(1))
    order[[PLACE, -1]] = order[[-1, PLACE]]
    positions = torch.arange(TOKENS.size(1))[None]
    usual = observe(model, TOKENS, alone=True, position_ids=positions)[0]
    swapped = observe(model, TOKENS[:, order], alone=True, position_ids=positions[:, order])[0]
    return bool(moved(usual, swapped[:, order]).any())


def counts_otherwise(model: PreTrainedModel, _: re.Match) -> bool:
    """Outputs with position_ids 0, 1, 2, ... differ from those without."""
    positions = torch.arange(TOKENS.size(1))[None]
    with torch.no_grad():
        return bool(moved(*(model(TOKENS, **given).logits for given in ({}, {"position_ids": positions}))).any())


def lacks_argument(model: PreTrainedModel, match: re.Match) -> bool:
    """transformers refuses the argument too."""
    try:
        model(input_ids=TOKENS, **{match[1]: torch.arange(TOKENS.size(1))[None]})
    except TypeError as error:
        return match[1] in str(error)
    return False


def sees_later(model: PreTrainedModel, _: re.Match) -> bool:
    """A token changes the outputs of earlier tokens."""
    with torch.no_grad():
        return bool(moved(*(model(tokens).logits for tokens in (TOKENS, changed(TOKENS))))[:PLACE].any())


def other_loss(model: PreTrainedModel, _: re.Match) -> bool:
    """The model's own loss is not the cross entropy of its logits for the next token."""
    with torch.no_grad():
        result = model(input_ids=TOKENS, labels=TOKENS)
    expected = F.cross_entropy(result.logits[0, :-1], TOKENS[0, 1:])
    return bool((result.loss - expected).abs() > 1e-4 * expected)


def no_base(model: PreTrainedModel, match: re.Match) -> bool:
    return not hasattr(model, match[1])


def no_head(model: PreTrainedModel, _: re.Match) -> bool:
    return model.get_output_embeddings() is None


def any_of(*checks: Callable[[PreTrainedModel, re.Match], bool]) -> Callable[[PreTrainedModel, re.Match], bool]:
    return lambda model, match: any(check(model, match) for check in checks)


CHECKS: list[tuple[str, Callable[[PreTrainedModel, re.Match], bool]]] = [
    (r"^(\w+) does not compute attention through", own_attention),
    (r"uses the entries of its attention mask", mask_is_altered),
    (r"neither causal nor a causal sliding window", mask_is_neither),
    (r"has no mask made by transformers", any_of(mask_is_altered, mask_is_neither)),
    (r"see each other outside of its attention", tokens_mix),
    (r"adds to its causal mask", mask_is_ruled),
    (r"layers of the kind indexed_attention", selects_keys),
    (r"layers of the kind", any_of(tokens_mix, mask_is_neither)),
    (r"uses a token's index", goes_by_place),
    (r"does not count positions", counts_otherwise),
    (r"has no argument (\w+):", lacks_argument),
    (r"asks for attention that is not causal", sees_later),
    (r"computes another loss", other_loss),
    (r"has an encoder", lambda model, _: model.config.is_encoder_decoder),
    (r"has no base model (\w+)", no_base),
    (r"is not a causal language model", no_head),
]
