# SPDX-License-Identifier: Apache-2.0
"""The options of tools/plan.py, and the planning problems that they describe."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from megatron.simulator.machines.machine import Machine
from megatron.simulator.machines.machine_file import load
from megatron.simulator.planner.plans import Problem
from megatron.simulator.planner.request import Request, big_number, seconds, share_of_memory, tokens
from megatron.simulator.planner.run_cost import Terms, read_prices, read_rates
from megatron.simulator.planner.search_space import Limits
from megatron.training.families.named import shape
from megatron.training.refusal import Refusal
from megatron.training.untrusted.largest_numbers import MOST_RANKS
from tools.option_parser import OptionParser

SIZES = ("tensor", "ulysses", "ring", "data", "pipeline", "virtual", "micro_batch", "expert")
# Share of the device's memory. The formulas for memory are within 2 % of dry runs, and of steps on a CPU, except for
# FPDT with few long chunks (tests/unit/test_formulas.py, tests/distributed/test_dry_run.py).
MARGIN = "2%"


def parser(description: str) -> argparse.ArgumentParser:
    options = OptionParser(description, allow_abbrev=False)
    options.add_argument("--model", metavar="NAME", help="named shape, for example llama3-8b")
    options.add_argument("--gpus", required=True, nargs="+", metavar="N", help="number of GPUs, or several to compare")
    options.add_argument(
        "--gpu", required=True, nargs="+", metavar="NAME", help="kind of GPU, or several: names, or machine files"
    )
    options.add_argument("--seq-length", metavar="N", help="tokens of a sequence")
    options.add_argument("--longest", action="store_true", help="the longest sequence that fits, and its plan")
    options.add_argument("--global-batch", default="1", metavar="N", help="sequences per step (1)")
    options.add_argument(
        "--documents",
        default="",
        metavar="FILE|mean:N",
        help="sequences are packed documents of these lengths, or "
        "trees of answers that share a prompt: prompt:24K,answers:8,answer:8K",
    )
    options.add_argument(
        "--reference", action="store_true", help="a frozen copy of the weights computes each sample first (--dpo)"
    )
    options.add_argument("--window", default="0", metavar="N", help="tokens that a query sees, including itself")
    options.add_argument(
        "--window-attn-skip-freq", default="0", metavar="N", help="every N-th layer sees all tokens, not the --window"
    )
    options.add_argument(
        "--expert-imbalance",
        type=float,
        default=1.0,
        metavar="F",
        help="tokens of the busiest rank's experts, over the mean (1)",
    )
    options.add_argument(
        "--margin", default=MARGIN, metavar="SIZE", help=f"memory of a GPU to leave free: 2GiB, 3%% ({MARGIN}%)"
    )
    options.add_argument("--top", default="10", metavar="N", help="plans to show (10), each the best of its grid")
    options.add_argument("--json", metavar="FILE", help="write all ranked plans")
    options.add_argument("--output", metavar="FILE.png", help="draw time and memory of all plans")
    options.add_argument("--html", metavar="FILE", help="write a page with all plans, to sort and filter")
    options.add_argument("--confirm", action="store_true", help="dry run of the best plan, by the real program")
    options.add_argument(
        "--jitter", type=float, default=0.0, metavar="SHARE",
        help="variation of ranks' compute, standard deviation over mean: prints a step's mean and 95th percentile",
    )  # fmt: skip
    options.add_argument("--seed", type=int, metavar="N", help="random seed of --jitter (1234)")
    run = options.add_argument_group("a complete run")
    run.add_argument("--train-tokens", metavar="N", help="tokens to train on, such as 300B: prints days and GPU-hours")
    run.add_argument("--prices", type=Path, metavar="FILE", help="JSON, currency and gpu_hour by GPU: prints the cost")
    run.add_argument("--deadline", metavar="TIME", help="the cheapest run that takes at most 36h, 30d, 2w")
    run.add_argument("--budget", metavar="N", help="the fastest run that costs at most this, in money or GPU-hours")
    run.add_argument(
        "--failures", type=Path, metavar="FILE", help="JSON, rates of failures: when to save, and what failures cost"
    )
    narrow = options.add_argument_group("narrow the search")
    sizes = {"nargs": "+", "metavar": "N"}
    narrow.add_argument("--tensor", **sizes, help="sizes of TP to try")
    narrow.add_argument("--ulysses", **sizes, help="of Ulysses")
    narrow.add_argument("--ring", **sizes, help="of Ring")
    narrow.add_argument("--data", **sizes, help="of DP")
    narrow.add_argument("--pipeline", **sizes, help="of PP")
    narrow.add_argument("--expert", **sizes, help="of EP")
    narrow.add_argument("--virtual", **sizes, help="virtual pipeline stages per rank")
    narrow.add_argument("--micro-batch", **sizes, help="sequences per forward pass (1, 2, 4, 8, 16)")
    narrow.add_argument("--zero", nargs="+", type=int, choices=range(4), help="stages of ZeRO to try")
    narrow.add_argument(
        "--recompute", nargs="+", choices=("none", "selective", "full", "block"),
        help="what to recompute; block: only some layers of a stage",
    )  # fmt: skip
    narrow.add_argument("--fpdt-chunk", nargs="+", metavar="N", help="only FPDT, with one of these chunks in tokens")
    narrow.add_argument("--no-fpdt", action="store_true", help="no FPDT")
    narrow.add_argument("--no-offload", action="store_true", help="no offload to host memory")
    narrow.add_argument("--no-loss-chunks", action="store_true", help="no chunks in the loss, except with FPDT")
    narrow.add_argument("--no-ffn-chunks", action="store_true", help="no chunks in the FFN, except with FPDT")
    narrow.add_argument("--no-overlap", action="store_true", help="no overlap of communication with compute")
    return options


def planning_problems(args: argparse.Namespace, flags: list[str]) -> tuple[Request, list[Problem]]:
    """(request, a planning problem for each kind and number of GPUs).

    Raises:
        Refusal: an option has an invalid value, or contradicts others.
    """
    if args.model:
        shape(args.model)  # raises Refusal for an unknown name and lists the known ones
        flags = ["--model", args.model, *flags]
    if args.longest == bool(args.seq_length):
        raise Refusal("give either --seq-length N or --longest")
    if args.longest and len(args.gpus) * len(args.gpu) > 1:
        raise Refusal("--longest: give one --gpus and one --gpu")
    if not 0 <= args.jitter < 1:
        raise Refusal(f"--jitter {args.jitter:g}: give a share from 0 to below 1, such as 0.02")
    if args.seed is not None and not args.jitter:
        raise Refusal(f"--seed {args.seed} has no effect without --jitter: add --jitter SHARE, or leave it out")
    if args.no_fpdt and args.fpdt_chunk:
        raise Refusal("--no-fpdt and --fpdt-chunk exclude each other: leave one out")
    if args.confirm and args.reference:
        raise Refusal("--confirm with --reference: a dry run needs the pairs: add --dry-run to the printed command")
    if args.confirm and args.documents:
        raise Refusal("--confirm with --documents: a dry run has one document per sample: leave one out")
    window = 0 if args.window == "0" else tokens(args.window, "--window")
    skip = 0 if args.window_attn_skip_freq == "0" else tokens(args.window_attn_skip_freq, "--window-attn-skip-freq")
    if skip == 1 or (skip and not window):
        raise Refusal(f"--window-attn-skip-freq {skip} needs --window N and layers that have it: use 2 or more with it")
    request = Request(tuple(flags), tokens(args.global_batch, "--global-batch"), args.documents, window, skip,
                      args.expert_imbalance, args.reference)  # fmt: skip
    workload = request.workload(tokens(args.seq_length, "--seq-length") if args.seq_length else 1024)
    problems = []
    for machine in map(load, args.gpu):
        spare = share_of_memory(args.margin, machine.memory, "--margin")
        for gpus, used in sorted({on_nodes(text, machine) for text in args.gpus}, key=lambda pair: pair[0]):
            problems.append(Problem(workload, gpus, used, limits(args).of_shape(workload.shape), spare, machine.gpus))
    return request, problems


def on_nodes(text: str, machine: Machine) -> tuple[int, Machine]:
    """(number of GPUs, machine with the GPUs used per node): complete nodes, or the same part of each, at least half.

    Raises:
        Refusal: the GPUs cannot be spread evenly over nodes.
    """
    gpus = tokens(text, "--gpus")
    if gpus > MOST_RANKS:
        raise Refusal(f"--gpus {gpus}: exceeds {MOST_RANKS:,}; use a smaller number")
    if gpus <= machine.gpus or gpus % machine.gpus == 0:
        return gpus, machine
    cards = machine.network.gpus_per_card
    use = [size for size in range(machine.gpus // 2, machine.gpus) if gpus % size == 0 and size % cards == 0]
    if not use:
        below = gpus // machine.gpus * machine.gpus
        raise Refusal(
            f"--gpus {gpus} cannot be spread evenly over nodes of {machine.gpus} {machine.name}, at least half of each "
            f"in use: use {below} or {below + machine.gpus}, or give --gpu a file with another number of gpus "
            "(docs/use/machine-files.md)"
        )
    return gpus, replace(machine, gpus=use[-1])


def terms(args: argparse.Namespace) -> Terms | None:
    """The options about a complete run; None without --train-tokens.

    Raises:
        Refusal: an option has an invalid value, or needs --train-tokens.
    """
    if not args.train_tokens:
        given = [name for name in ("prices", "deadline", "budget", "failures") if getattr(args, name)]
        if given:
            raise Refusal(f"--{given[0]} is about a complete run: add --train-tokens N")
        return None
    return Terms(
        big_number(args.train_tokens, "--train-tokens"),
        read_prices(args.prices) if args.prices else None,
        read_rates(args.failures) if args.failures else None,
        seconds(args.deadline, "--deadline") if args.deadline else 0.0,
        big_number(args.budget, "--budget") if args.budget else 0.0,
    )


def limits(args: argparse.Namespace) -> Limits:
    chunks = (0,) if args.no_fpdt else counts(args.fpdt_chunk, "--fpdt-chunk")
    return Limits(
        **{name: counts(getattr(args, name), "--" + name.replace("_", "-")) for name in SIZES},
        zero=tuple(args.zero) if args.zero else None,
        recompute=tuple(args.recompute) if args.recompute else None,
        fpdt_chunk=chunks,
        offload=not args.no_offload,
        loss_chunks=not args.no_loss_chunks,
        ffn_chunks=not args.no_ffn_chunks,
        overlap=not args.no_overlap,
    )


def counts(texts: list[str] | None, flag: str) -> tuple[int, ...] | None:
    return None if texts is None else tuple(sorted({tokens(text, flag) for text in texts}))
