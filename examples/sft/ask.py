#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ask a fine-tuned model of Hugging Face the questions of its chats, with transformers' generate.

    python examples/sft/ask.py out/sft/tuned --chats out/sft/chats.jsonl

The first answer that the file gives to a question counts as correct. The script prints some of the model's answers, and
how many of all are correct word for word.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def questions(path: Path) -> list[tuple[list[dict], str]]:
    """(messages of a question without earlier turns, the answer) of each question."""
    questions = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        messages = json.loads(line)["messages"]
        head = [message for message in messages if message["role"] == "system"]
        turns = messages[len(head) :]
        for user, assistant in zip(turns[::2], turns[1::2]):
            questions.setdefault(user["content"], ([*head, user], assistant["content"]))
    return list(questions.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--chats", type=Path, required=True, metavar="FILE")
    parser.add_argument("--most", type=int, default=48, help="questions (default: %(default)s)")
    parser.add_argument("--at-least", type=float, default=0.0, help="share that must be right, else exit 1")
    args = parser.parse_args(argv)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(args.model, trust_remote_code=False).eval()
    asked, right = questions(args.chats)[: args.most], 0
    for number, (messages, answer) in enumerate(asked):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            out = model.generate(**ids, max_new_tokens=64, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        given = tokenizer.decode(out[0, ids["input_ids"].size(1) :], skip_special_tokens=True).strip()
        right += given == answer.strip()
        if number < 4:
            print(f"  {messages[-1]['content']}  {given}")
    print(f"{right} of {len(asked)} questions answered word for word")
    return int(right < args.at_least * len(asked))


if __name__ == "__main__":
    sys.exit(main())
