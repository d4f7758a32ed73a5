#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares Ulysses 2 x Ring 2 with one process, for every decoder that the installed transformers registers.

    python benchmarks/families.py --results tests/distributed/data/families.jsonl

For a small random model of each family, loss, logits and all gradients must equal those of one process; or the model is
refused, and the reason is checked, too. Each family runs in separate processes, with a limit on time and memory.
Families in the results file are not tried again. The table is written into docs/use/hugging-face.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import megatron.core.parallel_state  # noqa: E402, F401 - imported once, before the ranks are forked

from benchmarks.forked_ranks import on_ranks  # noqa: E402
from tests.families import FAMILIES, outcome  # noqa: E402

PAGE = ROOT / "docs" / "use" / "hugging-face.md"
RESULTS = ROOT / "tests" / "distributed" / "data" / "families.jsonl"
START, END = "<!-- written by benchmarks/families.py -->", "<!-- end -->"
MEMORY = 16 * 2**30  # address space of one process
LARGE_ERROR = 1e-5  # above it, the table shows the error
ORDER = ("parity", "refused", "not buildable", "wrong", "crash", "not tried")
Results = dict[str, dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, required=True, help="file with a line of JSON for each family; a rerun adds to it"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page with the table")
    parser.add_argument("--seconds", type=float, default=120, help="limit for one family")
    parser.add_argument("families", nargs="*", help="default: all")
    options = parser.parse_args(argv)

    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    results = read(options.results)
    for family in tqdm(options.families or FAMILIES, disable=not sys.stderr.isatty()):
        if family in results:
            continue
        answer = on_ranks(4, limited, family, patience=options.seconds)
        results[family] = answer if isinstance(answer, dict) else {"outcome": "crash", "why": str(answer)}
        with options.results.open("a") as file:
            file.write(json.dumps({"family": family, **results[family]}) + "\n")
    before, _, rest = options.page.read_text().partition(START)  # keep the text around the table
    options.page.write_text(before + START + "\n" + table(results, FAMILIES) + END + rest.partition(END)[2])
    bad = [family for family, one in results.items() if not good(one)]
    if bad:
        print(f"neither parity nor a refusal with a true reason: {', '.join(bad)}")
    return 1 if bad else 0


def limited(family: str) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    return outcome(family)


def good(one: dict[str, Any]) -> bool:
    """Whether the outcome is acceptable; a refusal's reason must have been confirmed."""
    return one["outcome"] in ("parity", "not buildable") or (one["outcome"] == "refused" and one.get("true") is True)


def read(results: Path) -> Results:
    lines = map(json.loads, results.read_text().splitlines()) if results.exists() else ()
    return {line.pop("family"): line for line in lines}


def table(results: Results, families: tuple[str, ...]) -> str:
    """Markdown: counts, and all families, even those not tried, by outcome and reason."""
    rows = {family: results.get(family, {"outcome": "not tried"}) for family in families}
    counts = Counter(row["outcome"] for row in rows.values())
    outcomes = ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name])
    head = f"transformers {transformers.__version__}, PyTorch {torch.__version__.partition('+')[0]}"
    lines = [f"{head}: {len(rows)} families, {outcomes}.", "", "| outcome | families |", "|---|---|"]
    groups: dict[str, list[str]] = {}
    for family, row in sorted(rows.items(), key=lambda item: ORDER.index(item[1]["outcome"])):
        unsure = "" if good(row) or row["outcome"] == "not tried" else "**"
        reason = ": " + reason_of(row["why"]) if row["outcome"] != "not buildable" and row.get("why") else ""
        error = f" ({row['error']:.1e})" if row.get("error", 0) > LARGE_ERROR else ""
        groups.setdefault(f"{unsure}{row['outcome']}{unsure}{reason}", []).append(family + error)
    lines += [f"| {outcome} | {', '.join(names)} |" for outcome, names in groups.items()]
    return "\n".join(lines) + "\n"


def reason_of(why: str) -> str:
    """The reason of a refusal without the name of the model's class and what all refusals say, for a table."""
    why = re.sub(r"\b[A-Z]\w*(?:For|Model|LM|CrossAttention)\w*", "the model", why).replace("the the", "the")
    if "layers of the kind" in why:
        return "the model has layers of other kinds than full_attention and sliding_attention"
    ends = ", and a rank holds|, and over ranks there is|: not supported|: attention over"
    return re.split(ends, why)[0].replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
