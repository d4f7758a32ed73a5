#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare a predicted step with a measured one: a dry run's trace with torch.profiler's of a run with the same flags.

    python tools/compare_trace.py out/dry_run_trace.json.gz out/rank-0.json.gz

Operations are matched by name and order; the tables show, for each phase and kind, how often operations were called
and how long they took, predicted and measured. Both files open in https://ui.perfetto.dev; --merged writes one trace
with both.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rich.console import Console
from rich.table import Table

from megatron.system.whole_file import replace_file
from tools import trace_alignment as traces
from tools.merged_trace import merged
from tools.option_parser import OptionParser, in_one_line
from tools.profiled_trace import measured


@in_one_line(traces.NoTrace, OSError)
def main(argv: list[str] | None = None) -> int:
    parser = OptionParser(__doc__)
    parser.add_argument("predicted", type=Path, help="trace of a dry run (next to its --dry-run-json)")
    parser.add_argument("measured", type=Path, nargs="+", help="torch.profiler's traces, of one rank each")
    named = "the ranks of these traces (default: those of names like rank-3.json.gz, else 0, 1, ...)"
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help=named)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison")
    parser.add_argument("--merged", type=Path, metavar="FILE", help="write one trace with both, to look at")
    options = parser.parse_args(argv)
    named = [re.search(r"rank-(\d{1,6})\b", path.name) for path in options.measured]
    ranks = options.ranks or [int(name[1]) if name else number for number, name in enumerate(named)]
    if len(ranks) != len(options.measured):
        parser.error(f"--ranks names {len(ranks)} ranks for {len(options.measured)} files: give one for each")
    dry = traces.read(options.predicted)
    if not traces.is_predicted(dry):
        raise traces.NoTrace(f"{options.predicted}: is not a dry run's trace: give that one first")
    real = [(rank, traces.read(path)) for rank, path in zip(ranks, options.measured)]
    console, rows = Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False), []
    for rank, trace in real:
        ours = traces.predicted(dry, rank)
        result = traces.compare(ours, measured(trace, {x.name: x.kind for x in ours if x.kind not in traces.KINDS}))
        console.print(_table(result, rank))
        if result.pairs is None:
            console.print(f"The two differ in more than {traces.MOST_EDITS} operations, too many to match their order.")
        else:
            both = f"{len(result.pairs)} of {len(result.ours)} predicted and {len(result.theirs)} measured operations"
            console.print(f"Rank {rank}: {both} are in both, in the same order: {result.share:.1%} of the predicted.")
        for name, more in result.differences()[:8]:
            console.print(f"- {name}: {abs(more)} more {'predicted' if more > 0 else 'measured'}")
        rows.append({"rank": rank, "share": result.share, "rows": result.rows(), "alone": dict(result.differences())})
    if options.json:
        replace_file(options.json, json.dumps(rows, indent=1) + "\n")
    if options.merged:
        replace_file(options.merged, json.dumps(merged(dry, real)) + "\n")
        console.print(f"both: {options.merged}")
    return 0


def _table(result: traces.Comparison, rank: int) -> Table:
    table = Table("phase", "kind", title=f"rank {rank}: predicted and measured", title_justify="left")
    for name in ("calls", "measured", "ms", "measured", "ratio"):
        table.add_column(name, justify="right")
    for row in result.rows():
        ours, theirs = row["ms_predicted"], row["ms_measured"]
        calls = str(row["calls_predicted"]), str(row["calls_measured"])
        ratio = f"{ours / theirs:.2f}" if theirs else "-"
        table.add_row(row["phase"], row["kind"], *calls, f"{ours:,.3f}", f"{theirs:,.3f}", ratio)
    return table


if __name__ == "__main__":
    sys.exit(main())
