# SPDX-License-Identifier: Apache-2.0
"""Checks of fine-tuning: chats (--sft), and adapters (--lora-rank)."""

from __future__ import annotations

from megatron.training.arguments.config import Config
from megatron.training.arguments.weighted_paths import WEIGHTED
from megatron.training.refusal import Refusal

LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def check_sft(config: Config) -> None:
    """Settle --sft: conversations are documents of their own, with positions that restart."""
    data = config.data
    if not data.sft:
        return
    refused = {
        "--mock-data": (data.mock_data, "it has no chats"),
        "--fim-data": (data.fim_data, "it cuts texts, and chats have none"),
        "--rampup-seq-length": (data.rampup_seq_length, "it would cut conversations off"),
        "--dataloader-type cyclic": (data.dataloader_type == "cyclic", "epochs are shuffled anew without it"),
        "--eod-mask-loss": (data.eod_mask_loss, "the loss is on what the assistant says, the ends of its turns too"),
        **{"--" + name.replace("_", "-"): (getattr(data, name), "give --data-path FILE") for name in WEIGHTED},
    }
    for flag, (given, reason) in refused.items():
        if given:
            raise Refusal(f"--sft with {flag} is not supported ({reason}): leave one out")
    if data.tokenizer_type != "HuggingFaceTokenizer":
        raise Refusal(
            f"--sft needs a tokenizer with a chat template, not --tokenizer-type {data.tokenizer_type}: use "
            "--tokenizer-type HuggingFaceTokenizer --tokenizer-model DIR"
        )
    if data.sft_tokenizer_prompt_format.startswith("nemotron"):
        raise Refusal(
            f"--sft-tokenizer-prompt-format {data.sft_tokenizer_prompt_format}: Megatron-LM's own formats are not "
            "built in: write it as a Jinja template, and give that file, or leave it out for the tokenizer's own"
        )
    data.reset_position_ids = data.reset_attention_mask = True


def check_lora(config: Config) -> None:
    """Settle which layers get adapters, and refuse those that hide what goes into a layer."""
    model = config.model
    if model.lora_rank is None:
        return
    if unknown := [name for name in model.lora_targets if name not in LORA_TARGETS]:
        raise Refusal(f"--lora-targets {unknown[0]}: not supported; choose from {', '.join(LORA_TARGETS)}")
    model.lora_targets = [name for name in LORA_TARGETS if name in model.lora_targets]
    if not model.lora_targets:
        raise Refusal("--lora-targets names no layer: give one, or leave it out for all four")
    if model.transformer_impl == "transformer_engine" or model.fp8_format:
        given = "--fp8-format" if model.fp8_format else "--transformer-impl transformer_engine"
        raise Refusal(
            f"--lora-rank with {given} is not supported, since Transformer Engine's layers hide what goes into them: "
            "use --transformer-impl local, without FP8"
        )
    model.transformer_impl = "local"
