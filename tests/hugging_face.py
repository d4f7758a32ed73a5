# SPDX-License-Identifier: Apache-2.0
"""Tiny random decoders of transformers, a batch for them, and its results on one process."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

LENGTH, VOCABULARY, BATCH = 48, 96, 2
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
BOTH_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
# Many heads of the indexer: a score is seldom exactly 0, where transformers chooses some of the equal keys.
CHOICE = {
    "n_routed_experts": 4, "moe_intermediate_size": 16, "index_topk": 5, "index_head_dim": 8, "index_n_heads": 16,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "mixtral": MOE | {"sliding_window": None},
    "gemma": {"head_dim": 8},
    "gemma2": BOTH_KINDS
    | {"head_dim": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": BOTH_KINDS | {"head_dim": 8, "query_pre_attn_scalar": 16},
    "phi3": {},
    "olmo2": {},
    "gpt_neox": {},
    "granite": {"logits_scaling": 2.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "deepseek_v3": MLA | {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16},
    "gpt_oss": BOTH_KINDS | MOE | {"head_dim": 8},
    "deepseek_v32": MLA | CHOICE | {"n_group": 2, "topk_group": 1},
    "glm_moe_dsa": MLA | CHOICE | {"indexer_types": ["full", "shared", "full"], "num_hidden_layers": 3},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "head_dim": 8, "rotary_dim": 4, "index_n_heads": 2,
        "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2, "mlp_layer_types": ["dense"] * 2,
        "dense_intermediate_size": 48,
    },
}
# transformers makes masks for these that do not separate documents, because the models pass it no position_ids; or the
# model chooses blocks by position_ids among keys that it counts from the beginning of the sequence (MiniMax-M3).
UNPACKED = ("gpt_oss", "opt", "minimax_m3_vl_text")


def tiny_model(kind: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> PreTrainedModel:
    """A random model in evaluation mode whose weights all matter; the same on every rank."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **(SIZES | KINDS[kind] | sizes))
    return draw_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval())


def save_model(folder: Path, kind: str, sizes: dict[str, Any]) -> Path:
    """Write a random model whose weights all matter, in several files; returns the folder."""
    torch.manual_seed(3)
    model = draw_weights(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)))
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def save_with_later_tokens(folder: Path, kind: str, sizes: dict[str, Any], layers: int = 1) -> Path:
    """As :func:`save_model`, with further layers that predict later tokens, as in released files; in one file."""
    number, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    save_model(folder, kind, sizes | {"num_hidden_layers": number + layers})
    weights = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        path.unlink()
    for layer in range(number, number + layers):
        stem = f"model.layers.{layer}"
        weights[f"{stem}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.2
        for name in ("enorm", "hnorm", "shared_head.norm"):
            weights[f"{stem}.{name}.weight"] = torch.rand(hidden) + 0.5
        weights[f"{stem}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{stem}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": number, "num_nextn_predict_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draw_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Set random weights, so large that each matters and that every token depends on the tokens before it.

    The padding token's embedding is 0, as in models whose embedding has a padding index.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log") and parameter.dim() == 1:
                parameter.uniform_(-3, -1)  # states that last
            elif parameter.dim() == 1:
                parameter.uniform_(*((0.5, 1.5) if name.endswith("weight") else (-0.3, 0.3)))
            else:
                parameter.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
        embedding = model.get_input_embeddings()
        if getattr(embedding, "padding_idx", None) is not None:
            embedding.weight[embedding.padding_idx] = 0
    return model


def whole_batch(packed: bool = True, length: int = LENGTH, batch: int = BATCH) -> dict[str, Tensor]:
    """Tokens, labels (some ignored) and, if ``packed``, positions of documents that differ between samples."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    labels = tokens.masked_fill(torch.rand(batch, length, generator=generator) < 0.2, -100)
    result = {"input_ids": tokens, "labels": labels}
    if packed:
        cuts = [(0, 11 + 6 * row, 30, length) for row in range(batch)]
        rows = [torch.cat([torch.arange(b - a) for a, b in zip(row, row[1:])]) for row in cuts]
        result["position_ids"] = torch.stack(rows)
    return result


@dataclass
class Outcome:
    """Logits [b, s, vocabulary], the loss, and each parameter's gradient by name."""

    logits: Tensor
    loss: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)


def on_one_process(model: PreTrainedModel, batch: dict[str, Tensor]) -> Outcome:
    """Results of transformers; the loss has the model's dtype."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    loss.backward()
    return Outcome(logits.detach(), loss.detach(), take_grads(model))


def loss_of(model: torch.nn.Module, tokens: Tensor, labels: Tensor, mask: Tensor | None = None) -> float:
    """The mean loss of tokens and the labels of their places, of all or of those in the mask."""
    with torch.no_grad():
        each = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten(), reduction="none")
    return float(each.mean() if mask is None else (each * mask.flatten()).sum() / mask.sum())


def take_grads(model: torch.nn.Module) -> dict[str, Tensor]:
    result = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad(set_to_none=True)
    return result


def averaged(grads: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    if group is not None:
        for grad in grads.values():
            dist.all_reduce(grad, group=group)
            grad /= group.size()
    return grads


def errors(result: Outcome, expected: Outcome) -> dict[str, float]:
    """The largest errors, relative to the largest entry.

    Gradients that are only rounding errors are left out: without RoPE, a bias of keys shifts all scores of a query
    equally.
    """
    assert set(result.grads) == set(expected.grads)
    pairs = {"logits": (result.logits, expected.logits), "loss": (result.loss, expected.loss)}
    pairs |= {name: (grad, expected.grads[name]) for name, grad in result.grads.items()}
    largest = max(float(grad.abs().max()) for grad in expected.grads.values())
    pairs = {name: (a, b) for name, (a, b) in pairs.items() if max(a.abs().max(), b.abs().max()) > 1e-7 * largest}
    return {name: float((a.double() - b.double()).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}
