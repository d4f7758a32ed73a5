# SPDX-License-Identifier: Apache-2.0
"""Makes a model for generation from a checkpoint and a few flags, and refuses settings that it does not support."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.inference.decoder import Decoder
from megatron.training.arguments.argv import options
from megatron.training.arguments.parser import parse, settings, spellings
from megatron.training.checkpoint import checkpoint
from megatron.training.checkpoint.arguments_of import shape_of
from megatron.training.checkpoint.checksums import choose_whole
from megatron.training.checkpoint.hugging_face.safetensors_folder import TOKENIZERS
from megatron.training.checkpoint.megatron_lm.checked import COMMON, fitting, open_unchecked
from megatron.training.checkpoint.megatron_lm.places import checkpoint_path, is_hugging_face
from megatron.training.json_file import json_object
from megatron.training.model.build import build_model
from megatron.training.refusal import Refusal, refuse_together
from megatron.training.settings.config import Config, DataConfig
from megatron.training.setup import Runtime

TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern",
             "tiktoken_num_special_tokens")  # fmt: skip
PACKING = ("reset_attention_mask", "reset_position_ids")  # a prompt is one document
DTYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Saved:
    """The settings in a checkpoint in addition to the model's.

    Attributes:
        settings: the tokenizer, as {"section.field": value}.
        dtype: one of :data:`DTYPES`.
        stop: ids that end an answer; None: the tokenizer's end of a document.
    """

    settings: dict[str, Any]
    dtype: str
    stop: tuple[int, ...] | None


def configure(words: Sequence[str], load: str, step: int | None, dtype: str | None, world: int) -> tuple[Config, Saved]:
    """A checked configuration of the model in ``load``.

    Args:
        words: flags of training; only those of the settings in ``generation`` in their fields are accepted.
        step: iteration of the checkpoint; default the latest.
        dtype: dtype of the computation; default the checkpoint's.
        world: number of processes.

    Raises:
        Refusal: an unsupported flag or setting, or no checkpoint.
    """
    given = _given(words)
    path = checkpoint_path(Path(load), step)
    if path is None:
        raise Refusal(
            f"--load {load} holds no checkpoint: give a checkpoint of this program, Megatron-LM or Hugging Face"
        )
    saved = read_saved(path, Path(load))
    saved_settings = dict(saved.settings)
    if any(name in given for name in TOKENIZER):  # flags replace the checkpoint's tokenizer completely
        saved_settings = {key: value for key, value in saved_settings.items() if key.split(".")[1] not in TOKENIZER}
    if "tokenizer_type" in given:
        saved_settings.pop("model.vocab_size", None)
    dtype = dtype or saved.dtype
    defaults = saved_settings | {
        "data.micro_batch_size": 8,
        "data.seq_length": 2 * world,  # any grid can split it; the prompts have other lengths
        "data.mock_data": True,
        "optimizer.bf16": dtype == "bf16",
        "optimizer.fp16": dtype == "fp16",
        "run.skip_train": True,
        "run.eval_iters": 0,
        "checkpoint.finetune": True,
        "checkpoint.use_checkpoint_args": True,
    }
    defaults = {key: value for key, value in defaults.items() if key.split(".")[1] not in given}

    def without_length(folder: str, number: int | None, skip: bool) -> dict[str, Any] | None:
        shape = shape_of(folder, number, skip)
        if shape and shape.get("reward_model"):
            raise Refusal(f"{folder} is a reward model, which generates nothing: score with tools/evaluate.py")
        return shape and {name: value for name, value in shape.items() if name != "seq_length"}

    command = [*words, "--load", load, *([] if step is None else ["--ckpt-step", str(step)])]
    config = parse(command, defaults, world, without_length)
    check_mask(config)
    check_experts(config, load)
    return config, saved


def _given(words: Sequence[str]) -> set[str]:
    """Names of the settings that the flags set. Raises Refusal if a flag is unsupported."""
    known = {flag: field for _, _, field in settings() for flag in spellings(field)}
    names = set()
    for flag, *_ in options(words):
        if (field := known.get(flag)) is None:
            continue
        if (reads := field.metadata.get("generation")) is not True:
            why = reads or "generation does not use this flag of training"
            raise Refusal(f"{flag} is not for generation: {why}; leave {flag} out")
        names.add(field.name)
    return names


def check_experts(config: Config, load: str) -> None:
    """Refuse experts whose answers would depend on other prompts, or that are spread over replicas of the model."""
    model, parallel = config.model, config.parallel
    if model.num_experts is None:
        return
    if model.moe_expert_capacity_factor is not None:
        raise Refusal(
            f"--load {load}: its experts have a capacity (--moe-expert-capacity-factor), so an answer would depend on "
            "the other prompts; evaluate it with tools/evaluate.py"
        )
    ranks = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    expert = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    if ranks % expert:
        raise Refusal(
            f"--expert-model-parallel-size {parallel.expert_model_parallel_size}",
            "spreads experts over replicas, which answer different prompts: EP times expert TP must divide the "
            f"{ranks} ranks of TP x CP",
        )


def check_mask(config: Config) -> None:
    """Refuse masks with which a token attends to later ones, or that depend on the length of the sequence."""
    attention = config.attention
    mask = attention.attention_mask
    if config.data.reset_attention_mask:
        raise Refusal("--attention-mask document is not for generation: a prompt is one document; use causal or window")
    if attention.sees_ahead:
        size = attention.window_size
        setting = f"window with --window-size {size[0]},{size[1]}" if mask == "window" and size else mask
        raise Refusal(
            f"--attention-mask {setting} lets tokens attend to later ones, which do not exist yet: use a causal mask"
        )
    if mask == "block-sparse":
        raise Refusal(
            "--attention-mask block-sparse is not for generation: its blocks depend on the length of the sequence; "
            "use causal, window or function"
        )


def read_saved(path: Path, folder: Path) -> Saved:
    """The settings in the checkpoint ``path`` of ``--load folder``."""
    if is_hugging_face(path):
        config = json_object(open_unchecked(path, "config.json").file("config.json"))
        kind = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        dtype = {"bfloat16": "bf16", "float16": "fp16"}.get(kind, "fp32")
        return Saved(_tokenizer_in(path), dtype, _stop_in(path))
    config = open_unchecked(path, COMMON).common().get("config")
    if config is None:  # Megatron-LM's checkpoints have no tokenizer
        return Saved({}, "fp32", None)
    data, optimizer, model = (config.get(name, {}) for name in ("data", "optimizer", "model"))
    fitting({name: data[name] for name in TOKENIZER if name in data}, path, DataConfig)
    tokenizer = {f"data.{name}": data[name] for name in TOKENIZER if data.get(name) is not None}
    if "data.tokenizer_type" in tokenizer:
        size = model.get("vocab_size")
        tokenizer |= {} if size is None else {"model.vocab_size": size}  # without it, the tokenizer's size
    else:
        tokenizer = _tokenizer_in(folder / "hf")
    dtype = "bf16" if optimizer.get("bf16") else "fp16" if optimizer.get("fp16") else "fp32"
    return Saved(tokenizer, dtype, _stop_in(folder / "hf"))


def _tokenizer_in(folder: Path) -> dict[str, Any]:
    """The settings of the folder's Hugging Face tokenizer; empty if it has none."""
    if any((folder / name).is_file() for name in TOKENIZERS):
        return {"data.tokenizer_type": "HuggingFaceTokenizer", "data.tokenizer_model": str(folder)}
    return {}


def _stop_in(folder: Path) -> tuple[int, ...] | None:
    """The ids at which transformers ends an answer of the model in a Hugging Face folder; None if it names none."""
    for name in ("generation_config.json", "config.json"):
        ids = json_object(folder / name).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return None


def check_length(config: Config, longest: int, new_tokens: int, where: str) -> None:
    """Refuse prompts that, with their answers, are longer than a table of learned positions."""
    table = config.model.max_position_embeddings
    if config.model.position_embedding_type == "learned_absolute" and longest + new_tokens - 1 > table:
        raise Refusal(
            f"{where} has {longest} tokens, and --max-new-tokens {new_tokens} goes beyond the {table} learned "
            f"positions of the model: use at most {max(table - longest + 1, 0)}, or a shorter prompt"
        )


def load_decoder(config: Config, runtime: Runtime, vocab_size: int) -> Decoder:
    """Build this rank's part of the model and read its weights. All ranks call it.

    Raises:
        Refusal: on every rank, if the checkpoint is damaged or belongs to another model.
    """
    last = refuse_together(lambda: checkpoint.find(config.checkpoint, config.notes))
    path = choose_whole(last, config.checkpoint, config.notes)
    chunks = build_model(config, runtime.grid, runtime.layout, vocab_size, runtime.device)
    checkpoint.load(path, chunks, None, None, config, unread=PACKING)
    return Decoder(chunks[0], runtime.grid, runtime.layout.balance)
