#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make pairs of answers from chats: the right answer is chosen, the answer to another question rejected.

python examples/preferences/make_pairs.py out/dpo/chats.jsonl out/dpo/pairs.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chats", type=Path)
    parser.add_argument("pairs", type=Path)
    args = parser.parse_args(argv)
    known = {}
    for line in args.chats.read_text(encoding="utf-8").splitlines():
        messages = [one for one in json.loads(line)["messages"] if one["role"] != "system"]
        known |= {user["content"]: answer["content"] for user, answer in zip(messages[::2], messages[1::2])}
    draw, answers = random.Random(0), sorted(set(known.values()))
    with args.pairs.open("w", encoding="utf-8") as file:
        for question, answer in known.items():
            other = draw.choice([one for one in answers if one != answer])
            file.write(json.dumps({"prompt": question, "chosen": answer, "rejected": other}) + "\n")
    print(f"{args.pairs}: {len(known)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
