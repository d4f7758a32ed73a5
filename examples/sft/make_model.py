#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the inputs of finetune.sh: a small random Llama with a tokenizer and a chat template, and chats.

    python examples/sft/make_model.py --model out/sft/model --chats out/sft/chats.jsonl

The chats are about invented places, so that the model can learn the answers only from the chats. Each
place has a river and a colour. A conversation asks about several places, one in each turn.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# The generation marks enclose the assistant's words. They are optional (docs/use/fine-tuning.md).
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
COLOURS = ("red", "green", "blue", "white", "black", "yellow", "grey", "brown")
SOUNDS = ("ba", "do", "fe", "gi", "ku", "la", "mo", "ne", "pi", "ru", "sa", "to", "vi", "wo", "ze", "sho")
SYSTEM = "You know the places of the map."


def facts(places: int) -> dict[str, str]:
    """Questions and their answers."""
    draw = random.Random(0)

    def name() -> str:
        return "".join(draw.sample(SOUNDS, 3)).capitalize()

    result = {}
    for _ in range(places):
        place = name()
        result[f"Which river runs through {place}?"] = f"The {name()} runs through {place}."
        result[f"What colour is the tower of {place}?"] = f"It is {draw.choice(COLOURS)}."
    return result


def chats(known: dict[str, str], count: int) -> Iterator[dict[str, Any]]:
    """Conversations of one to six questions."""
    draw = random.Random(1)
    for _ in range(count):
        messages = [{"role": "system", "content": SYSTEM}]
        for question in draw.sample(sorted(known), draw.randint(1, 6)):
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": known[question]})
        yield {"messages": messages}


def make_model(folder: Path, texts: list[str]) -> None:
    """A Llama of four layers, with a byte-level BPE tokenizer trained on ``texts``."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    how = {"special_tokens": SPECIAL, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    words.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1024, **how))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(**sizes, **heads, **ids, tie_word_embeddings=False, initializer_range=0.05)
    LlamaForCausalLM(config).save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder to write")
    parser.add_argument("--chats", type=Path, required=True, metavar="FILE", help="JSON lines to write")
    parser.add_argument("--places", type=int, default=10, help="places to know (default: %(default)s)")
    parser.add_argument("--count", type=int, default=2000, help="conversations (default: %(default)s)")
    args = parser.parse_args(argv)
    known = facts(args.places)
    lines = list(chats(known, args.count))
    args.chats.parent.mkdir(parents=True, exist_ok=True)
    args.chats.write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_model(args.model, [message["content"] for line in lines[:200] for message in line["messages"]])
    print(f"{args.model}: a random Llama; {args.chats}: {len(lines)} conversations about {len(known)} facts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
