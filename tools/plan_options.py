# SPDX-License-Identifier: Apache-2.0
"""The options of tools/plan.py, and the problems that they put."""

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
from megatron.training.arguments.models import shape
from megatron.training.refusal import Refusal

SIZES = ("tensor", "ulysses", "ring", "data", "pipeline", "virtual", "micro_batch")
# Of the device. Closed forms of memory are within 2 % of dry runs, and of steps on a CPU, nearly everywhere
# (tests/unit/test_formulas.py, tests/distributed/test_dry_run.py); FPDT with few long chunks is the exception.
MARGIN = "2%"


def parser(description: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    found.add_argument("--model", metavar="NAME", help="named shape, for example llama3-8b")
    found.add_argument("--gpus", required=True, nargs="+", metavar="N", help="how many; several numbers: which of them")
    found.add_argument(
        "--gpu", required=True, nargs="+", metavar="NAME", help="known names, or files (docs/use/machine-files.md)"
    )
    found.add_argument("--seq-length", metavar="N", help="tokens of a sequence")
    found.add_argument("--longest", action="store_true", help="the longest sequence that fits, and its plan")
    found.add_argument("--global-batch", default="1", metavar="N", help="sequences a step (1)")
    found.add_argument(
        "--documents", default="", metavar="FILE|mean:N", help="sequences are packed documents of these lengths"
    )
    found.add_argument("--window", default="0", metavar="N", help="tokens that a query sees, itself among them")
    found.add_argument(
        "--margin", default=MARGIN, metavar="SIZE", help=f"of a GPU's memory that plans leave: 2GiB, 3%% ({MARGIN}%)"
    )
    found.add_argument("--top", default="10", metavar="N", help="plans to show (10), each the best of its grid")
    found.add_argument("--json", metavar="FILE", help="write all ranked plans")
    found.add_argument("--output", metavar="FILE.png", help="draw time and memory of all plans")
    found.add_argument("--html", metavar="FILE", help="write a page with all plans, to sort, filter and look at")
    found.add_argument("--confirm", action="store_true", help="one simulated step of the winner, by the real program")
    found.add_argument(
        "--jitter", type=float, default=0.0, metavar="SHARE",
        help="ranks' compute varies by this, standard deviation over mean: a step's mean and 95th percentile",
    )  # fmt: skip
    found.add_argument("--seed", type=int, metavar="N", help="of --jitter (1234)")
    run = found.add_argument_group("a whole run")
    run.add_argument("--train-tokens", metavar="N", help="to train on: its days and GPU-hours; 15T, 300B (1000s)")
    run.add_argument("--prices", type=Path, metavar="FILE", help="JSON, currency and gpu_hour by GPU: its money")
    run.add_argument("--deadline", metavar="TIME", help="the cheapest that takes at most 36h, 30d, 2w")
    run.add_argument("--budget", metavar="N", help="the fastest that costs at most so much, or so many GPU-hours")
    run.add_argument(
        "--failures", type=Path, metavar="FILE", help="JSON, how often GPUs fail: when to save, what it costs"
    )
    narrow = found.add_argument_group("narrow the search")
    sizes = {"nargs": "+", "metavar": "N"}
    narrow.add_argument("--tensor", **sizes, help="sizes of TP to try")
    narrow.add_argument("--ulysses", **sizes, help="of Ulysses")
    narrow.add_argument("--ring", **sizes, help="of Ring")
    narrow.add_argument("--data", **sizes, help="of DP")
    narrow.add_argument("--pipeline", **sizes, help="of PP")
    narrow.add_argument("--virtual", **sizes, help="virtual pipeline stages a rank")
    narrow.add_argument("--micro-batch", **sizes, help="sequences a forward pass (1, 2, 4, 8, 16)")
    narrow.add_argument("--zero", nargs="+", type=int, choices=range(4), help="stages of ZeRO to try")
    narrow.add_argument(
        "--recompute", nargs="+", choices=("none", "selective", "full", "block"),
        help="what to recompute; block: some layers of a stage alone",
    )  # fmt: skip
    narrow.add_argument("--fpdt-chunk", nargs="+", metavar="N", help="FPDT with one of these chunks, in tokens")
    narrow.add_argument("--no-fpdt", action="store_true", help="no FPDT")
    narrow.add_argument("--no-offload", action="store_true", help="nothing goes to host memory")
    narrow.add_argument("--no-loss-chunks", action="store_true", help="the loss in one piece, but for FPDT")
    narrow.add_argument("--no-ffn-chunks", action="store_true", help="the FFN in one piece, but for FPDT")
    narrow.add_argument("--no-overlap", action="store_true", help="gradients and weights do not travel beside compute")
    return found


def asked(args: argparse.Namespace, flags: list[str]) -> tuple[Request, list[Problem]]:
    """What is to be planned: a problem for each kind and number of GPUs.

    Raises:
        Refusal: an option is wrong by itself or with others.
    """
    if args.model:
        shape(args.model)  # refuses unknown ones by listing the known
        flags = ["--model", args.model, *flags]
    if args.longest == bool(args.seq_length):
        raise Refusal("give either --seq-length N or --longest")
    if args.longest and len(args.gpus) * len(args.gpu) > 1:
        raise Refusal("--longest: give one --gpus and one --gpu")
    if not 0 <= args.jitter < 1:
        raise Refusal(f"--jitter {args.jitter:g}: give a share from 0 to below 1, such as 0.02")
    if args.seed is not None and not args.jitter:
        raise Refusal(f"--seed {args.seed} is of --jitter: add --jitter SHARE, or leave it out")
    if args.no_fpdt and args.fpdt_chunk:
        raise Refusal("--no-fpdt and --fpdt-chunk exclude each other: leave one out")
    if args.confirm and args.documents:
        raise Refusal("--confirm with --documents: the dry run takes each sample for one document: leave one out")
    window = 0 if args.window == "0" else tokens(args.window, "--window")
    request = Request(tuple(flags), tokens(args.global_batch, "--global-batch"), args.documents, window)
    workload = request.workload(tokens(args.seq_length, "--seq-length") if args.seq_length else 1024)
    problems = []
    for machine in map(load, args.gpu):
        spare = share_of_memory(args.margin, machine.memory, "--margin")
        for gpus, used in sorted({on_nodes(text, machine) for text in args.gpus}, key=lambda one: one[0]):
            problems.append(Problem(workload, gpus, used, limits(args), spare, machine.gpus))
    return request, problems


def on_nodes(text: str, machine: Machine) -> tuple[int, Machine]:
    """How many GPUs, and the machine with as many of a node in use: all of them where they fill nodes, else as many on
    each node, at least half of them.

    Raises:
        Refusal: they cannot be spread so.
    """
    gpus = tokens(text, "--gpus")
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
    """What the whole run is about; None: nothing was said of it.

    Raises:
        Refusal: an option is wrong, or lacks --train-tokens.
    """
    if not args.train_tokens:
        given = [name for name in ("prices", "deadline", "budget", "failures") if getattr(args, name)]
        if given:
            raise Refusal(f"--{given[0]} is about a whole run: add --train-tokens N")
        return None
    return Terms(
        big_number(args.train_tokens, "--train-tokens"),
        read_prices(args.prices) if args.prices else None,
        read_rates(args.failures) if args.failures else None,
        seconds(args.deadline, "--deadline") if args.deadline else 0.0,
        big_number(args.budget, "--budget") if args.budget else 0.0,
    )


def limits(args: argparse.Namespace) -> Limits:
    chunks = (0,) if args.no_fpdt else whole(args.fpdt_chunk, "--fpdt-chunk")
    return Limits(
        **{name: whole(getattr(args, name), "--" + name.replace("_", "-")) for name in SIZES},
        zero=tuple(args.zero) if args.zero else None,
        recompute=tuple(args.recompute) if args.recompute else None,
        fpdt_chunk=chunks,
        offload=not args.no_offload,
        loss_chunks=not args.no_loss_chunks,
        ffn_chunks=not args.no_ffn_chunks,
        overlap=not args.no_overlap,
    )


def whole(texts: list[str] | None, flag: str) -> tuple[int, ...] | None:
    return None if texts is None else tuple(sorted({tokens(text, flag) for text in texts}))
