# SPDX-License-Identifier: Apache-2.0
"""Four constants for all published runs: fitted to one half of the sources and tested on the other half.

Each is the share of a rate measured for single kernels that training reaches: for matrix products (``gemm``), FP8's
speed-up over bf16 (``fp8``), and attention. All machines of one architecture share them; Blackwell uses Hopper's
``gemm`` and ``fp8``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from examples.reproduce.open_records import Record, distinct, records
from examples.reproduce.record_price import Predicted, family, predict
from megatron.simulator.machines.machine_file import load

FREE = {"Hopper": ("gemm", "fp8"), "Blackwell": ("attention",), "Ampere": ("gemm",)}  # in the order of their fits
TAKES = {"Blackwell": ("Hopper", ("gemm", "fp8"))}  # (architecture whose constants it uses, which constants)
SHARES = ("gemm", "fp8", "attention")
MACHINES = {"Hopper": "H100-80G", "Blackwell": "B200-192G", "Ampere": "A100-80G"}  # whose file has a family's shares
STEPS = (1.15, 1.06, 1.02, 1.01)
Constants = dict[str, dict[str, float]]

# Constants that are not fitted: set by hand, from physics or published measurements, or assumed.
BY_HAND = (
    "record_price.py: seconds per parameter of DeepSpeed's optimizer in host memory (1)",
    "cost/layer_program.py: bytes of PyTorch's operations for RMSNorm, SwiGLU, cross-entropy and casts, counted (9)",
    "cost/layer_program.py: launches of the host per layer, eager, compiled, fused (3)",
    "cost/seconds.py: power grows with the square of the clock (1); idle watts of each GPU (1)",
    "kernels.flash1: half of FlashAttention-2 (1)",
    "record_price.py: bytes of Adam on a CPU, bandwidth of host memory (2)",
    "calibration.memory, overlap, link, p2p, all_to_all, network, host of the machines' files (7 per machine)",
    "records.json: kernels where a source names none, torchtitan's unbalanced rings, Llama 3's virtual stages",
)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def priced(rows: Sequence[Record]) -> list[Record]:
    """Records that can be predicted from their source (:attr:`Record.unpriced`)."""
    return [record for record in rows if not record.unpriced]


def by_source(result: Sequence[Predicted]) -> dict[str, list[Predicted]]:
    groups: dict[str, list[Predicted]] = {}
    for one in result:
        groups.setdefault(one.record.source, []).append(one)
    return groups


def of_priced(result: Sequence[Predicted]) -> list[Predicted]:
    """Predictions of runs that can be priced; all of them if none can."""
    return [one for one in result if not one.record.unpriced] or list(result)


def mean_of_sources(result: Sequence[Predicted]) -> float:
    """The mean of the sources' mean errors, so that sources with more rows do not count more."""
    return mean([mean_of_records(rows) for rows in by_source(result).values()])


def mean_of_records(result: Sequence[Predicted]) -> float:
    return mean([abs(one.error) for one in result])


def mean_of_rates(result: Sequence[Predicted]) -> float:
    """The error of tokens per second; each source counts once."""
    return mean([mean([abs(one.rate_error) for one in rows]) for rows in by_source(result).values()])


def unfitted() -> Constants:
    """Constants without a fit: training reaches the measured rates of single kernels."""
    return {name: dict.fromkeys(SHARES, 1.0) for name in FREE}


def fitted() -> Constants:
    """The constants of the shipped machines, which planner and dry run use: fitted to the even half."""
    result = {name: load(machine).calibration for name, machine in MACHINES.items()}
    return {name: {share: getattr(result[name], share) for share in SHARES} for name in FREE}


def uncertain() -> dict[str, dict[str, tuple[float, float]]]:
    """Each constant as fitted to either half, lower value first, as in the shipped machines' ``uncertain``."""
    return {name: {key: load(MACHINES[name]).uncertain[key] for key in free} for name, free in FREE.items()}


def fit(half: Sequence[Record]) -> Constants:
    """Coordinate search for the least :func:`mean_of_sources` by architecture. Architectures without records
    in the half keep the initial values. Unpriced runs are not used."""
    result, half = unfitted(), priced(half)
    for name, free in FREE.items():
        if name in TAKES:
            other, taken = TAKES[name]
            result[name] |= {constant: result[other][constant] for constant in taken}
        mine = [record for record in half if family(record.machine) == name]
        if mine:
            result[name] = _search(result[name], free, lambda shares, name=name, mine=mine: mean_of_sources(
                [predict(record, {name: shares}) for record in mine]))  # fmt: skip
    return result


def _search(shares: dict[str, float], free: Sequence[str], error: Callable[[dict[str, float]], float]) -> dict:
    best = error(shares)
    for step in STEPS:
        better = True
        while better:
            better = False
            for name in free:
                for factor in (step, 1 / step):
                    moved = shares | {name: round(shares[name] * factor, 4)}
                    if moved[name] <= 1 and (result := error(moved)) < best - 1e-3:
                        shares, best, better = moved, result, True
    return shares


def predictions(constants: Constants, rows: Sequence[Record] | None = None) -> list[Predicted]:
    return [predict(record, constants) for record in (records() if rows is None else rows)]


def left_out_one_by_one(rows: Sequence[Record]) -> dict[str, list[Predicted]]:
    """Predictions of each source with constants fitted to all others, of both halves."""
    result = {}
    for source in dict.fromkeys(record.source for record in rows):
        mine = [record for record in rows if record.source == source]
        result[source] = predictions(fit([record for record in rows if record.source != source]), mine)
    return result


def summary(constants: Constants) -> list[str]:
    """Markdown: each source with its half, runs, configurations, error without and with the constants. Mean
    and worst error are those of runs that can be priced, if the source has any."""
    lines = ["| source, half | runs, distinct, not priced | not fitted, with constants, worst, % |", "|---" * 3 + "|"]
    before, after = by_source(predictions(unfitted())), by_source(predictions(constants))
    for source in sorted(after, key=lambda name: (not after[name][0].record.fitted, name)):
        rows = after[source]
        counts = f"{len(rows)}, {distinct([one.record for one in rows])}"
        unpriced = sum(bool(one.record.unpriced) for one in rows)
        with_constants, without = (of_priced(result[source]) for result in (after, before))
        worst = max((one.error for one in with_constants), key=abs)
        half = "fitted" if rows[0].record.fitted else "test"
        lines.append(
            f"| {source}, {half} | {counts}, {unpriced} | {mean_of_records(without):.1f}, "
            f"{mean_of_records(with_constants):.1f}, {worst:+.0f} |"
        )
    return lines


def totals(constants: Constants) -> list[str]:
    """Markdown: runs and errors by half and machine. Unpriced runs have a separate line; further lines have
    :func:`other_counts` of the test half."""
    lines = ["| half, machine | records | distinct | not fitted | with the constants |", "|---" * 5 + "|"]
    pairs = list(zip(predictions(unfitted()), predictions(constants)))
    every = [pair for pair in pairs if not pair[1].record.unpriced]
    for name, in_half in (("fitted", True), ("test", False)):
        half = [pair for pair in every if pair[1].record.fitted == in_half]
        lines.append(_line(f"**{name}**", half))
        for machine in dict.fromkeys(after.record.machine for _, after in half):
            lines.append(_line(f"{name}, {machine}", [pair for pair in half if pair[1].record.machine == machine]))
    lines.append(_line("not priced", [pair for pair in pairs if pair[1].record.unpriced]))
    test = [after for _, after in pairs if not after.record.fitted]
    return [*lines, "", *other_counts(of_priced(test), "test half"), *other_counts(test, "with what is not priced")]


def other_counts(test: Sequence[Predicted], name: str) -> list[str]:
    """Other counts of the same error: by source, of rates, the median, without the largest and the worst source."""
    groups = by_source(test)
    largest = max(groups.values(), key=len)[0].record.source
    worst = max(groups, key=lambda source: mean_of_records(groups[source]))
    rates = mean([abs(one.rate_error) for one in test])
    lines = [
        f"{name}: {len(test)} records of {len(groups)} sources; seconds {mean_of_records(test):.1f} %, "
        f"tokens per second {rates:.1f} %; each source once: seconds {mean_of_sources(test):.1f} %, "
        f"tokens per second {mean_of_rates(test):.1f} %; median {median(abs(one.error) for one in test):.1f} %"
    ]
    for source in dict.fromkeys((largest, worst)):
        others = [one for one in test if one.record.source != source]
        lines.append(
            f"  without {source}: seconds {mean_of_records(others):.1f} %; each source once "
            f"{mean_of_sources(others):.1f} %, tokens per second {mean_of_rates(others):.1f} %"
        )
    return lines


def _line(name: str, pairs: Sequence[tuple[Predicted, Predicted]]) -> str:
    before, after = zip(*pairs)
    return (
        f"| {name} | {len(pairs)} | {distinct([one.record for one in after])} | {mean_of_records(before):.1f} % | "
        f"{mean_of_records(after):.1f} % |"
    )
