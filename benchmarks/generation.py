#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speed of prompt processing and decoding, and memory of keys and values, by grid and for transformers' generate.

    python benchmarks/generation.py
    python benchmarks/generation.py --prompt-length 8192 --new-tokens 64 --grids "1" "r2" "u2" "t2" --repeats 5

A random Llama of 27M parameters (--hidden-size 512, 8 layers), greedy, in fp32. Each repetition starts new processes,
each with one thread; transformers runs in one process with one thread. Rates are tokens per CPU second of the busiest
process, the best of all repetitions: a busy machine has little effect on them, and they do not include waits between
processes. The JSON also has wall-clock seconds, for an idle machine. Bytes are those of the rank that has most.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import environment  # noqa: E402

VOCABULARY = 8192
AXES = {"t": "--tensor-model-parallel-size", "u": "--ulysses-parallel-size", "r": "--ring-parallel-size",
        "p": "--pipeline-model-parallel-size"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--grids", nargs="+", default=["1", "u2", "r2", "t2", "u2r2"], help="as u2r2: Ulysses 2, Ring 2"
    )
    parser.add_argument("--prompt-length", type=int, default=4096, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--prompts", type=int, default=1, metavar="N", help="prompts in a batch")
    parser.add_argument("--hidden-size", type=int, default=512, metavar="N")
    parser.add_argument("--layers", type=int, default=8, metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--flags", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(args, folder)
        repetitions: dict[str, list[dict[str, Any]]] = {name: [] for name in ("transformers", *args.grids)}
        for _ in range(args.repeats):
            for name, results in repetitions.items():
                results.append(run_repetition(name, args, folder))
                print(name, results[-1], file=sys.stderr, flush=True)
    size = f"{args.prompts} x {args.prompt_length} tokens read, {args.new_tokens} written"
    print(f"{size}; load {os.getloadavg()[0]:.1f}")
    print(f"{'':14}{'tokens per CPU second: read':>28}{'written':>10}{'bytes per rank':>16}")
    for name, results in repetitions.items():
        read, write = (min(one["cpu"][part] for one in results) for part in (0, 1))
        read, write = args.prompts * args.prompt_length / read, args.prompts * (args.new_tokens - 1) / write
        print(f"{name:14}{read:28,.0f}{write:10,.1f}{results[0]['bytes']:16,}")
    if args.json:
        args.json.write_text(
            json.dumps({"arguments": {**vars(args), "json": None}, "turns": repetitions}, indent=1) + "\n"
        )


def make_model(args: argparse.Namespace, folder: str) -> None:
    """Save a Llama with random weights: 8 query heads, 4 key/value heads."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": args.hidden_size, "intermediate_size": 2 * args.hidden_size, "vocab_size": VOCABULARY}
    sizes |= {"num_hidden_layers": args.layers, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, max_position_embeddings=2 * args.prompt_length, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)


def prompts(args: argparse.Namespace) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY - 1, (args.prompts, args.prompt_length), generator=generator).tolist()


def run_repetition(name: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Start the processes of a grid, or of transformers, and return their figures."""
    axes = re.findall(r"([turp])(\d+)", name) if name != "transformers" else []
    ranks = math.prod(int(size) for _, size in axes)
    sizes = [f"--prompt-length={args.prompt_length}", f"--new-tokens={args.new_tokens}", f"--prompts={args.prompts}"]
    flags = " ".join(f"{AXES[axis]} {size}" for axis, size in axes)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        program = [__file__, *sizes, "--worker", file.name, "--folder", folder, "--grids", name, f"--flags={flags}"]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, *program]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr}")
        return json.loads(Path(file.name).read_text())


def work(args: argparse.Namespace) -> None:
    """One process of a repetition; the first one writes the figures."""
    figures = _transformers(args) if args.grids == ["transformers"] else _ours(args)
    if os.environ.get("RANK", "0") == "0":
        Path(args.worker).write_text(json.dumps(figures))


def _ours(args: argparse.Namespace) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron.inference.generate import Request, generate
    from megatron.inference.load import configure, load_decoder
    from megatron.training.setup import start, stop

    words = f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} {args.flags}".split()
    config, _ = configure(words, args.folder, None, None, int(os.environ.get("WORLD_SIZE", "1")))
    runtime = start(config)
    try:
        decoder = load_decoder(config, runtime, VOCABULARY)
        generate(decoder, [prompt[:64] for prompt in prompts(args)], Request(2, batch=args.prompts))  # warm
        wall, cpu = [], []
        for count in (1, args.new_tokens):
            begin, used = time.perf_counter(), time.process_time()
            _, counts = generate(decoder, prompts(args), Request(count, batch=args.prompts))
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - used)
        every: list = [None] * dist.get_world_size()
        dist.all_gather_object(every, (cpu, counts.cache_bytes))
        cpu = [max(one[0][part] for one in every) for part in (0, 1)]
        held = max(one[1] for one in every)
        return {"wall": (wall[0], wall[1] - wall[0]), "cpu": (cpu[0], cpu[1] - cpu[0]), "bytes": held}
    finally:
        stop()


def _transformers(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    options = {"attn_implementation": "sdpa", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(args.folder, trust_remote_code=False, **options).eval()
    ids = torch.tensor(prompts(args))

    def measured(count: int) -> tuple[float, float, Any]:
        begin, used = time.perf_counter(), time.process_time()
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        how = {"do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
        result = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **how)
        return time.perf_counter() - begin, time.process_time() - used, result.past_key_values

    wall, cpu, _ = measured(1)
    all_wall, all_cpu, cache = measured(args.new_tokens)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"wall": (wall, all_wall - wall), "cpu": (cpu, all_cpu - cpu), "bytes": held}


if __name__ == "__main__":
    main()
