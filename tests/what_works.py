# SPDX-License-Identifier: Apache-2.0
"""The table of combinations in docs/use/what-works.md, counted from the cases that the tests run.

python -m tests.what_works    prints it
"""

from __future__ import annotations

from tests.distributed import (
    test_drawn_grids,
    test_dropout,
    test_experts,
    test_fpdt,
    test_later_tokens,
    test_rope,
    test_training,
)

FILES = (test_training, test_fpdt, test_dropout, test_rope, test_experts, test_later_tokens)

# Heading: words; a case counts if its command line has at least one of them. An axis of size 1 does not count.
SETTINGS = {
    "TP": ("--tensor-model-parallel-size",),
    "Ulysses": ("--ulysses-parallel-size",),
    "Ring": ("--ring-parallel-size",),
    "PP": ("--pipeline-model-parallel-size",),
    "ZeRO1": ("--zero-stage 1",),
    "ZeRO2,3": ("--zero-stage 2", "--zero-stage 3"),
    "recompute": ("--recompute-granularity",),
    "FPDT": ("--fpdt ",),
    "masks": ("--attention-mask", "--window-size", "--reset-attention-mask"),
    "ALiBi": ("alibi",),
    "dropout": ("dropout 0.",),
    "GQA": ("--num-query-groups",),
    "experts": ("--num-experts",),
    "MTP": ("--mtp-num-layers",),
}


def commands() -> list[str]:
    """Flags of all cases that compare losses and all gradients with one process, in the full run of the tests."""
    lists = ("LLAMA_CASES", "GPT_CASES", "CASES")
    triples = [case for module in FILES for name in lists for case in getattr(module, name, ())]
    triples += [(world, f"{test_training.GQA} {mask}", grid) for world, mask, grid in test_training.LLAMA]
    triples += [*test_training.LEARNED, *test_drawn_grids.cases()]
    return [f"{model} {grid} ".replace("-size 1 ", " ") for _, model, grid in triples]


def held(command: str) -> set[str]:
    """The settings of a command line."""
    return {name for name, words in SETTINGS.items() if any(word in command for word in words)}


def table() -> str:
    """Markdown: how many cases have the settings of the row and of the column; the diagonal counts one setting."""
    settings = [held(command) for command in commands()]
    lines = [f"||{'|'.join(SETTINGS)}|", f"|---|{'---:|' * len(SETTINGS)}"]
    for row in SETTINGS:
        counts = (sum({row, column} <= one for one in settings) for column in SETTINGS)
        lines.append(f"|{row}|{'|'.join(f'{count or chr(8211)}' for count in counts)}|")
    return "\n".join(lines)


if __name__ == "__main__":
    print(f"{len(commands())} cases")
    print(table())
