#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of log-probabilities and entropies with their gradients: ours, TRL's in chunks, complete logits.

    python benchmarks/log_probs.py --tokens 2048 --vocab 152064

Each way runs in a process of its own, whose peak of resident memory is reported without that before the pass.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from importlib.util import find_spec

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
WAYS = ("ours", "TRL", "complete logits")


def measure(way: str, tokens: int, hidden: int, vocab: int) -> tuple[float, float, float]:
    """(GiB above the inputs and gradients of a pass, seconds, sum of log-probabilities and entropies)."""
    import torch

    import megatron.context_parallel as cp

    torch.set_num_threads(1)
    torch.manual_seed(1)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (0.05 * torch.randn(vocab, hidden)).requires_grad_()
    targets = torch.randint(vocab, (tokens,))
    states.grad, weight.grad = torch.zeros_like(states), torch.zeros_like(weight)
    if way == "TRL":
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if way == "ours":
        chosen, entropy, _ = cp.log_probs(states[:, None], weight, targets[:, None], entropy=True)
    elif way == "TRL":
        chosen, entropy, *_ = ChunkedLogProbFunction.apply(states, weight, None, targets, 1.0, 8192)
    else:
        every = (states @ weight.t()).log_softmax(-1)
        chosen, entropy = every.gather(1, targets[:, None]), -(every.exp() * every).sum(-1)
    total = chosen.sum() + entropy.sum()
    total.backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (peak - before) / 2**20, time.perf_counter() - begin, float(total)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="(default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=152064, help="(default: %(default)s)")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.way:
        print(*measure(args.way, args.tokens, args.hidden, args.vocab))
        return 0
    print(f"{args.tokens} tokens, hidden size {args.hidden}, vocabulary {args.vocab}, fp32, one thread")
    for way in WAYS:
        if way == "TRL" and find_spec("trl") is None:
            print(f"{way:16} not installed")
            continue
        sizes = ["--tokens", str(args.tokens), "--hidden", str(args.hidden), "--vocab", str(args.vocab)]
        done = subprocess.run([sys.executable, __file__, "--way", way, *sizes], check=True, stdout=subprocess.PIPE)
        memory, seconds, total = map(float, done.stdout.split())
        print(f"{way:16} {memory:6.2f} GiB {seconds:6.1f} s   sum {total:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
