# SPDX-License-Identifier: Apache-2.0
"""``cp.certify``: runs a program on one process and on grids, and says whether they agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from statistics import median

import torch

from megatron.certifying.bisecting import FirstDifference, bisect
from megatron.certifying.comparing import Compared, compare
from megatron.certifying.of_torch.choices import Flip
from megatron.certifying.processes_of_program import Processes, Run
from megatron.certifying.recording import GRADIENT, LOSS, NORM, Program, Recording, Reference, measure, record
from megatron.certifying.rows import Rows, find_positions
from megatron.certifying.scripts.printed import Printed
from megatron.certifying.sight import Allowed, Seen, changed_by_tokens, compare_changes, rows_by_rank, tokens_to_change
from megatron.system.whole_file import save_figure

Sizes = Mapping[str, int]
AGREES_UNCOMPILED = "without torch.compile the program agrees: what torch.compile made of it does not"
WITHOUT_COMPILE = "choices can be replayed only without torch.compile: what it makes of the program is not compared"
AGREES_LATER = "when it ran again, it agreed: its results on this grid change from run to run"


@dataclass
class OnGrid:
    """The result on one grid.

    Attributes:
        compared: every loss, gradient, norm and update.
        place: where the program first differs; None if all agree.
        seen: which outputs each changed token changes, if this was requested.
        flips: choices of each rank among scores that rounding reorders; ``compared`` has the numbers with the choices
            of one process.
        note: why ``place`` or ``seen`` is unknown.
    """

    sizes: Sizes
    compared: list[Compared]
    place: FirstDifference | None = None
    seen: list[Seen] = field(default_factory=list)
    flips: list[tuple[int, Flip]] = field(default_factory=list)
    note: str = ""

    @property
    def wrong(self) -> list[Compared]:
        return [one for one in self.compared if not one.right]

    @property
    def right(self) -> bool:
        return not self.wrong and all(one.right for one in self.seen)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items())


@dataclass
class Certificate:
    """The result of :func:`certify`; printed, it is a table with a verdict."""

    grids: list[OnGrid]

    @property
    def right(self) -> bool:
        return all(grid.right for grid in self.grids)

    def __str__(self) -> str:
        return "\n".join([*self._table(), *self._details(), self.verdict])

    @property
    def verdict(self) -> str:
        """One line: whether all grids agree with one process, and how exactly."""
        wrong = [str(grid) for grid in self.grids if not grid.right]
        if wrong:
            return f"WRONG: results differ from one process on {'; '.join(wrong)}"
        count = len(self.grids[0].compared)
        limits = [one.limit for grid in self.grids for one in grid.compared if one.key[0] == GRADIENT]
        note = f"; most gradients would show an error above {median(limits):.0e}" if limits else ""
        flips = sum(len(grid.flips) for grid in self.grids)
        note += f"; with {flips} choices replaced that rounding made" if flips else ""
        return f"RIGHT: {count} numbers agree on {', '.join(map(str, self.grids))}{note}"

    def _table(self) -> list[str]:
        rows = [("grid", "losses", "gradients", "norm", "updates", "largest error in", "of limit", "verdict")]
        for grid in self.grids:
            worst = {kind: [one for one in grid.compared if one.key[0] == kind]
                     for kind in ("loss", GRADIENT, NORM, "update")}  # fmt: skip
            cells = [f"{max(one.worst for one in some):.1e}" if some else "-" for some in worst.values()]
            top = max(grid.compared, key=lambda one: one.worst / one.limit if one.limit else math.inf * one.worst or 0)
            share = f"{top.worst / top.limit:.2g}" if top.limit else "-"
            named = " ".join(str(part) for part in top.key if str(part))
            rows.append((str(grid), *cells, named, share, "right" if grid.right else "WRONG"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]

    def _details(self) -> list[str]:
        lines = []
        for grid in self.grids:
            for one in sorted(grid.wrong, key=lambda one: -one.worst)[:8]:
                lines.append(f"  {grid}: {one}")
            if len(grid.wrong) > 8:
                lines.append(f"  {grid}: and {len(grid.wrong) - 8} more")
            if grid.place is not None:
                lines.append(f"  {grid}: {grid.place}")
            for rank, flip in grid.flips[:4]:
                lines.append(
                    f"  {grid}: {flip.module or 'the model'} chose {flip.chosen} on rank {rank}, {flip.right} on one "
                    f"process, in row {flip.row} of its scores; these differ by {flip.gap:.1e}, rounding explains "
                    f"{2 * flip.limit:.1e}; compared with the choice of one process"
                )
            if len(grid.flips) > 4:
                lines.append(f"  {grid}: and {len(grid.flips) - 4} more such choices")
            if grid.note:
                lines.append(f"  {grid}: {grid.note}")
            lines += [f"  {grid}: {one}" for one in grid.seen if not one.right]
            if grid.seen and all(one.right for one in grid.seen):
                lines.append(
                    f"  {grid}: {len(grid.seen)} changed tokens change exactly the outputs that they may change"
                )
        return lines

    def draw(self, path: str) -> None:
        """Write a picture: parameters by grids, coloured by the gradient's error over its limit."""
        from matplotlib.figure import Figure

        names = list(dict.fromkeys(one.key[1] for g in self.grids for one in g.compared if one.key[0] == GRADIENT))
        errors = torch.full((len(names), len(self.grids)), float("nan"))
        for column, grid in enumerate(self.grids):
            for one in grid.compared:
                if one.key[0] == GRADIENT and one.limit:
                    errors[names.index(one.key[1]), column] = min(one.worst / one.limit, 1e6)
        figure = Figure(figsize=(3 + 1.2 * len(self.grids), 1.5 + 0.22 * len(names)), layout="constrained")
        axes = figure.add_subplot()
        image = axes.imshow(errors.clamp(min=1e-3).log10().numpy(), cmap="RdYlGn_r", vmin=-2, vmax=2, aspect="auto")
        axes.set_xticks(range(len(self.grids)), [str(grid) for grid in self.grids], rotation=30, ha="right")
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.set_title("Right" if self.right else "Wrong")
        bar = figure.colorbar(image, label="error of the gradient / what rounding explains", extend="both")
        bar.set_ticks([-2, -1, 0, 1, 2], labels=["0.01", "0.1", "1", "10", "100"])
        save_figure(figure, path, dpi=120)


def certify(
    program: Program,
    grids: Sequence[Sizes | int],
    *,
    mask: Allowed | None = None,
    layers: int = 1,
    edges: Sequence[int] = (),
    sees: bool = False,
    loss: str | None = None,
    loss_file: str | None = None,
    run: Run | None = None,
) -> Certificate:
    """Run a program on one process and on grids, and compare losses, gradients, clipping norm and update.

    There is no tolerance to choose: the limits follow from rounding in the dtypes of the program, measured on one
    process. If a grid differs, the program runs there once more, and the first module that differs is named.

    Args:
        program: called on each rank of a process group as ``program(ulysses=2, ring=1)``, with all sizes 1 on one
            process. It builds its model from the same weights, computes one step on the same data, and returns an
            :class:`~megatron.certifying.recording.Outcome`, or (model, loss). It is called several
            times in a process.
        grids: sizes by name, {"ulysses": 2}; a number N is {"ranks": N}.
        mask: with ``sees``: ``allowed(queries, keys)`` on positions, or a mask of this library.
        layers: number of layers that attend with this mask.
        edges: positions at which a document, a chunk or a window ends; tokens next to them are changed.
        sees: also change single tokens, and compare which outputs change.
        loss: a text: the losses are the numbers that the program prints after it. The program may return nothing;
            its model is what its optimizer changes.
        loss_file: the file in which one rank writes this text, if it is not printed.
        run: (function, ranks, *arguments) -> results by rank; default: new processes.

    Raises:
        ValueError: the program's numbers on one process are not finite, or it has no gradients.
        ProgramFailed: the program raised an error.
    """
    sizes = [{"ranks": grid} if isinstance(grid, int) else dict(grid) for grid in grids]
    if not sizes:
        raise ValueError("no grids to compare with one process: give at least one, for example [{'ulysses': 2}]")
    if loss is not None:
        program = Printed(program, loss, loss_file)
    elif loss_file is not None:
        raise ValueError("give the text before a loss in this file, too: --loss TEXT")
    names = list(dict.fromkeys(name for grid in sizes for name in grid))
    one_process = dict.fromkeys(names, 1)
    with ExitStack() as stack:
        if run is None:
            run = stack.enter_context(Processes()).run
        reference = run(measure, 1, program, one_process)[0]
        check_finite(reference)
        if loss is not None and not any(key[0] == LOSS for key in reference.recording.numbers):
            where = "prints" if loss_file is None else f"writes in {loss_file}"
            raise ValueError(
                f"on one process the program {where} no number after {loss!r}; certify reads its output, "
                "logging, TensorBoard, W&B and the file of --loss-file, and no other logger"
            )
        watched: Reference | None = None
        if reference.tied:
            watched = run(measure, 1, program, one_process, True)[0]
        result = []
        for grid in ({**one_process, **grid} for grid in sizes):
            ranks = math.prod(grid.values())
            on_grid = OnGrid({k: v for k, v in grid.items() if v > 1}, [])
            if not reference.tied:
                on_grid.compared = compare(reference, run(record, ranks, program, grid), len(sizes))
            if reference.tied or on_grid.wrong or sees:
                watched = watched or run(measure, 1, program, one_process, True)[0]
                choices = watched.choices(ranks) or None
                recorded = run(record, ranks, program, grid, True, None, choices)
            try:
                if reference.tied or on_grid.wrong:
                    examine(on_grid, watched, recorded, len(sizes), reference.tied)
                if sees:
                    rows = find_positions(watched.recording, recorded)
                    on_grid.seen = who_sees_whom(program, one_process, grid, rows, run, mask, layers, edges)
            except ValueError as error:
                on_grid.note = f"not examined further: {error}"
            result.append(on_grid)
    return Certificate(result)


def examine(on_grid: OnGrid, watched: Reference, recorded: Sequence[Recording], grids: int, tied: bool) -> None:
    """Complete what is known of a grid from a run with the choices of one process, in which modules were watched.

    Args:
        tied: rounding changes choices, so that only the numbers of this run can be compared.

    Raises:
        ValueError: the recorded numbers do not correspond.
    """
    on_grid.flips = [(rank, flip) for rank, one in enumerate(recorded) for flip in one.flips]
    again = compare(watched, recorded, grids)
    if tied or on_grid.flips:
        on_grid.compared = again
        on_grid.note = WITHOUT_COMPILE if recorded[0].compiled else ""
    wrong = [one for one in again if not one.right]
    if wrong:
        on_grid.place = bisect(watched, recorded, wrong)
    elif on_grid.wrong:
        on_grid.note = AGREES_UNCOMPILED if recorded[0].compiled else AGREES_LATER


def check_finite(reference: Reference) -> None:
    """Refuse a program whose numbers on one process cannot be compared.

    Raises:
        ValueError: a number is not finite, or there is no gradient.
    """
    numbers = reference.recording.numbers
    bad = [" ".join(map(str, key)) for key, x in numbers.items() if x is not None and not bool(x.isfinite().all())]
    if bad:
        raise ValueError(f"on one process {bad[0]} is not finite: use data and weights for which it is")
    if not any(key[0] == GRADIENT and x is not None for key, x in numbers.items()):
        raise ValueError("on one process no parameter has a gradient: call backward, or return Outcome(gradients=...)")


def who_sees_whom(
    program: Program, one_process: Sizes, sizes: Sizes, rows: Sequence[Rows], run: Run, mask: Allowed | None,
    layers: int, edges: Sequence[int],
) -> list[Seen]:  # fmt: skip
    """Change single tokens on one process and on a grid, and compare which outputs change."""
    positions = rows_by_rank(rows) if all(rows) else []
    length = sum(len(own) for own in positions)
    if not positions or not torch.equal(torch.cat(positions).sort().values, torch.arange(length)):
        raise ValueError(
            "which outputs a token changes is compared only on grids whose ranks split nothing but the sequence"
        )
    tokens = tokens_to_change(length, positions, edges)
    alone = run(changed_by_tokens, 1, program, one_process, tokens, [torch.arange(length)])[0]
    ranks = run(changed_by_tokens, math.prod(sizes.values()), program, sizes, tokens, positions)
    return compare_changes(tokens, alone, ranks, getattr(mask, "allowed", mask), layers)
