# SPDX-License-Identifier: Apache-2.0
"""Chats, a tokenizer for them, and chat templates of two common styles, written here."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

# Like Qwen's: a heading as text between two special tokens, and a line break after each turn.
CHATML = """\
{% if tools %}<|im_start|>system
tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}
{{- message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}{{ '<call>' + call['function']['name'] + '</call>' }}{% endfor %}
{{- '<|im_end|>' }}
{%- endgeneration %}
{% else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
# Like Llama 3's: a token at the beginning, headings between two tokens, texts without surrounding white space.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{- (message['content'] | trim) + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Like Llama 2's: there is no generation prompt; the answer follows directly.
LLAMA2 = """\
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endgeneration %}
{%- else %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2}
SPECIAL = (
    "<|begin|>",
    "<|end|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
TEXT = "the ring sends keys and values on; a rank holds its own queries. What is a tile? Two blocks that meet! äöü 12"
WORDS = TEXT.split()


def strip_marks(template: str) -> str:
    """A template without the generation marks; Jinja treats the white space around them as before."""
    opened = re.sub(r"\{%(-?) generation %\}", r"{%\1 if true %}", template)
    return re.sub(r"\{%(-?) endgeneration %\}", r"{%\1 endif %}", opened)


def make_tokenizer(folder: Path, template: str = "chatml", marked: bool = True, merges: int = 40) -> Path:
    """A byte-level BPE tokenizer of transformers, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + merges,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, bos_token=SPECIAL[0], eos_token=SPECIAL[1])
    text = TEMPLATES.get(template, template)
    tokenizer.chat_template = text if marked else strip_marks(text)
    tokenizer.save_pretrained(folder)
    return folder


def sentence(draw: random.Random, words: int) -> str:
    return " ".join(draw.choices(WORDS, k=words))


def conversation(draw: random.Random, turns: int, words: int, system: bool = False) -> dict[str, Any]:
    """A line of a file of chats."""
    messages = [{"role": "system", "content": sentence(draw, 4)}] if system else []
    for _ in range(turns):
        messages.append({"role": "user", "content": sentence(draw, draw.randint(1, words))})
        messages.append({"role": "assistant", "content": sentence(draw, draw.randint(1, words))})
    return {"messages": messages}


def write_chats(path: Path, count: int, seed: int = 1, turns: int = 2, words: int = 6) -> Path:
    """A file of conversations, some with a system message."""
    draw = random.Random(seed)
    lines = [conversation(draw, draw.randint(1, turns), words, draw.random() < 0.3) for _ in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
