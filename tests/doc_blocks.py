# SPDX-License-Identifier: Apache-2.0
"""Runs every bash block of README and docs/, as a reader would who types them page by page on a new machine.

    python -m tests.doc_blocks                       # makes a clone with its own .venv, then runs all pages: hours
    python -m tests.doc_blocks --page use/masks.md   # only this page; may be repeated

The blocks of a page run in order in one shell state: variables, arrays and an activated .venv stay, and ``out/`` is
empty at its beginning. A block that is marked ``refused`` must end with an error. ``CANNOT`` lists the blocks that
cannot run on one machine without a GPU, with the reason. The exit code is 1 if a block fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [Path("README.md"), *sorted(page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md"))]
MINUTES = 15.0
# Blocks that cannot run here: part of their text, and why.
CANNOT = {
    "bash tests/run.sh  ": "is the suite, which runs by itself",
    "benchmarks/attention_turns.py --before /tmp/before": "/tmp/before and /tmp/public stand for the reader's clones",
    "--nnodes 2": "needs two nodes",
    "--from old --to out/new": "`old` stands for a checkpoint of the reader's",
    "/data/text_document": "/data and the tokenizer stand for the reader's files",
    "rank-0.json.gz rank-1.json.gz": "needs the traces of a run on GPUs",
    "matrix.py --lab": "installs the libraries and runs for an hour",
    "--load out/needle/model-16384": "needs half an hour of examples/needle/quickstart.sh, as the page says",
    "FUZZ=10000": "takes hours; the laboratory draws 100 inputs for each reader",
}
# What a page tells its reader in words: part of the block, and what is run before it.
BEFORE = {
    "--load out/reward": """torchrun --standalone --nproc-per-node 4 pretrain_gpt.py --reward-model --save out/reward \\
    --data-path out/dpo/pairs.jsonl --load out/dpo/model --finetune --use-checkpoint-args \\
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model out/dpo/model --split 95,5,0 --seq-length 512 \\
    --micro-batch-size 1 --global-batch-size 4 --train-iters 5 --lr 1e-3 --context-parallel-size 4 --eval-iters 0
""",
    "python tools/plot_run.py out/log.jsonl": """[ -e out/log.jsonl ] ||
    bash examples/llama/pretrain_tiny_cpu.sh --log-jsonl out/log.jsonl
""",
}


class Block(NamedTuple):
    page: Path
    number: int
    text: str
    refused: bool = False

    @property
    def cannot(self) -> str:
        return next((why for part, why in CANNOT.items() if part in self.text), "")


def code_blocks(text: str, language: str) -> list[tuple[str, str]]:
    """The code blocks of a page's text, each as (words after the language, code)."""
    return re.findall(rf"^```{language}\b *(.*?)$\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[Block]:
    """The page's bash blocks; README has indented ones, without "..." in them."""
    text = (ROOT / page).read_text()
    found = code_blocks(text, "bash")
    if page.name == "README.md" and page.parent == Path():
        indented = re.findall(r"(?m)^ {4}((?:bash|python|torchrun) (?:.*\\\n)*.*)$", text)
        found = [("", command) for command in indented if "..." not in command]
    return [Block(page, number, text, "refused" in words) for number, (words, text) in enumerate(found)]


def run_page(page: Path, clone: Path, minutes: float) -> Iterator[dict]:
    """The results of a page's blocks, one after the other."""
    shutil.rmtree(clone / "out", ignore_errors=True)
    (clone / "out").mkdir()
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        state.touch()
        for block in blocks(page):
            result = {"page": str(page), "block": block.number, "text": block.text.strip()}
            if block.cannot:
                yield result | {"result": "not run", "why": block.cannot}
                continue
            begin = time.monotonic()
            before = "".join(text for part, text in BEFORE.items() if part in block.text)
            code, output = run_block(before + block.text, clone, state, 60 * minutes)
            good = code is not None and (code != 0) == block.refused
            seconds, end = round(time.monotonic() - begin, 1), output[-200 if good else -20000 :]
            result |= {"result": "ok" if good else "stopped" if code is None else "failed", "code": code}
            yield result | {"seconds": seconds, "output": end}


def run_block(text: str, clone: Path, state: Path, seconds: float) -> tuple[int | None, str]:
    """(Exit code of a block, None after ``seconds``; its output). Its variables are kept in the file ``state``."""
    script = f"source {state} 2>/dev/null\nset -e\n{text}\ndeclare -p >{state}\n"
    kept = ("HOME", "LANG", "TMPDIR", "PIP_CONFIG_FILE", "SSL_CERT_FILE", "HF_HUB_OFFLINE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment["PATH"] = f"{clone}/.venv/bin:{os.environ['PATH']}"
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=clone, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also when this process is stopped
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return code, log.read()


def new_clone(folder: Path) -> Path:
    """A clone of this repository's last commit, installed by the command that README names."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder)], check=True)
    subprocess.run(["bash", "scripts/setup.sh", "test"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="append", help="a page, as docs/ names it (all)")
    parser.add_argument("--clone", type=Path, help="an existing clone with .venv (a new one, deleted at the end)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"limit for a block ({MINUTES:g})")
    parser.add_argument("--jsonl", type=Path, help="write the results")
    args = parser.parse_args(argv)
    wanted = [page for page in PAGES if not args.page or str(page).removeprefix("docs/") in args.page]
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        clone = args.clone or new_clone(Path(folder) / "megatron-longcontext")
        for page in wanted:
            for result in run_page(page, clone.resolve(), args.minutes):
                failed += result["result"] in ("failed", "stopped")
                first = result["text"].splitlines()[0][:80]
                took = f"{result['seconds']:6.1f} s" if "seconds" in result else result["why"]
                print(f"{result['result']:8}{took}  {page} {result['block']}: {first}", flush=True)
                if args.jsonl:
                    with args.jsonl.open("a") as file:
                        file.write(json.dumps(result) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
