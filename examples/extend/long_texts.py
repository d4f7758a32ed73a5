#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keep the long documents of a JSON-lines file, as training data for extending the context.

    python examples/extend/long_texts.py out/extend/text.jsonl --at-least 24000 --output out/extend/long.jsonl

Lengths are in characters. For a real model, keep the mixture of sources and take the long documents of each source (Fu
et al. 2024, Data Engineering for Scaling Language Models to 128K Context).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", type=Path)
    parser.add_argument("--at-least", type=int, required=True, metavar="N", help="characters")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--key", default="text")
    args = parser.parse_args(argv)
    kept = total = 0
    with open(args.input, encoding="utf-8") as source, open(args.output, "w", encoding="utf-8") as target:
        for line in source:
            total += 1
            if len(json.loads(line)[args.key]) >= args.at_least:
                target.write(line)
                kept += 1
    if not kept:
        print(f"error: none of {total} documents has {args.at_least} characters: lower --at-least", file=sys.stderr)
        return 2
    print(f"{args.output}: {kept} of {total} documents, of {args.at_least} characters or more")
    return 0


if __name__ == "__main__":
    sys.exit(main())
