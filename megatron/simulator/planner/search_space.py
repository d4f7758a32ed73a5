# SPDX-License-Identifier: Apache-2.0
"""Everything that the planner may choose: grids that the program accepts, and memory savings on them.

The rules are those of training/arguments/validate/; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, gcd

from megatron.decisions.division import length_unit
from megatron.formulas.sizes import chunks_of
from megatron.formulas.strategy import Shape, Strategy, Workload
from megatron.training.refusal import Refusal

FPDT_CHUNKS = tuple(2**power for power in range(14, 20))  # 16K to 512K tokens
MICRO_BATCHES = (1, 2, 4, 8, 16)
LOSS_CHUNK_TOKENS = 1024  # a rank's tokens in a chunk of the loss that the planner proposes without FPDT
FFN_CHUNK_TOKENS = 4096  # a rank's tokens in a chunk of the FFN that the planner proposes without FPDT
UNITS = (2, 4, 8, 16)  # layers in a recomputed unit, in addition to one
EIGHTHS = range(1, 8)  # eighths of a stage's layers to recompute with --recompute-method block
QUARTERS = range(2, 8, 2)  # the same with FPDT; the search then looks for the fewest layers that fit


@dataclass(frozen=True)
class Limits:
    """The user's restrictions; None and True leave the choice to the planner."""

    # tensor, ulysses, ring, data, pipeline, virtual, micro_batch, zero, recompute, fpdt_chunk: the allowed values. A
    # `fpdt_chunk` of 0 means no FPDT; `recompute` may be `full` (all layers, in units) or `block` (some layers).
    tensor: tuple[int, ...] | None = None
    ulysses: tuple[int, ...] | None = None
    ring: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    virtual: tuple[int, ...] | None = None
    micro_batch: tuple[int, ...] | None = None
    zero: tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    fpdt_chunk: tuple[int, ...] | None = None
    offload: bool = True  # whether host memory may be used
    # loss_chunks, ffn_chunks: whether the loss, and the FFN, may be computed in chunks without FPDT
    loss_chunks: bool = True
    ffn_chunks: bool = True
    overlap: bool = True  # whether transfers of gradients and weights overlap compute
    expert: tuple[int, ...] | None = None  # EP; the planner does not split single experts

    def of_shape(self, shape: Shape) -> Limits:
        """These limits without what the program, or the planner, does not combine with the model's kinds of layers.

        Raises:
            Refusal: nothing is left.
        """
        if not shape.mixture and self.expert not in (None, (1,)):
            raise Refusal("--expert: the model has no experts: leave it out")
        if not (shape.mixture or shape.mixed or shape.output_gate):
            return self
        kinds = {"--is-hybrid-model": shape.pattern, "--num-experts": shape.mixture,
                 "--experimental-attention-variant": shape.linear, "--attention-output-gate": True}  # fmt: skip
        what = next(flag for flag, present in kinds.items() if present)
        if self.fpdt_chunk not in (None, (0,)):
            raise Refusal(f"--fpdt-chunk: the planner has no FPDT with {what}: leave it out")
        if not shape.mixture:
            return replace(self, fpdt_chunk=(0,))
        return replace(self, fpdt_chunk=(0,), ffn_chunks=False)


def grids(workload: Workload, gpus: int, limits: Limits = Limits()) -> Iterator[Strategy]:
    """Every grid of exactly ``gpus`` ranks that the program accepts, with each micro-batch and virtual stages.

    ZeRO and memory savings have their defaults.
    """
    shape, batch = workload.shape, workload.global_batch
    for tensor in chosen(divisors(gpus), limits.tensor):
        if not tensor_divides(shape, tensor):
            continue
        for ulysses in chosen(divisors(gpus // tensor), limits.ulysses):
            if shape.heads // tensor % ulysses:
                continue
            for pipeline in chosen(divisors(gpus // tensor // ulysses), limits.pipeline):
                less = fewer_layers(shape.layers, pipeline)
                if less is None:
                    continue
                for data in chosen(divisors(gpus // tensor // ulysses // pipeline), limits.data):
                    ring = gpus // tensor // ulysses // pipeline // data
                    if batch % data or not allowed(ring, limits.ring):
                        continue
                    if workload.seq_length % length_unit(ulysses, ring, "zigzag", tensor):
                        continue
                    sizes = (tensor, ulysses, ring, data, pipeline)
                    overlap = {name: limits.overlap for name in ("overlap_grad_reduce", "overlap_param_gather")}
                    base = Strategy(*sizes, **overlap, first_less=less[0], last_less=less[1])
                    for expert in chosen(expert_sizes(shape, gpus // pipeline), limits.expert):
                        yield from _schedules(base.but(expert=expert), workload, limits)


def _schedules(base: Strategy, workload: Workload, limits: Limits) -> Iterator[Strategy]:
    samples = workload.global_batch // base.data
    layers = base.most_layers(workload.shape.layers)
    for micro_batch in limits.micro_batch or MICRO_BATCHES:
        if samples % micro_batch:
            continue
        interleaved = base.pipeline > 1 and samples // micro_batch % base.pipeline == 0
        for virtual in chosen(divisors(layers), limits.virtual):
            # Larger differences need --decoder-...-num-layers, which cannot be combined with virtual stages. Those of
            # hybrids have no formula.
            even = max(base.first_less, base.last_less) < (2 if layers > virtual else 1)
            if virtual == 1 or (interleaved and even and not workload.shape.pattern):
                yield base.but(micro_batch=micro_batch, virtual=virtual)


def fewer_layers(layers: int, pipeline: int) -> tuple[int, int] | None:
    """(how many layers less than a middle stage the first of ``pipeline`` stages has, how many less the last has).

    If the sum is odd, the last stage, which has the loss, has one layer less than the first. None: a stage would have
    no layer.
    """
    missing = -layers % pipeline
    first, last = missing // 2, missing - missing // 2
    return (first, last) if (layers + missing) // pipeline > last and pipeline <= layers else None


def tensor_divides(shape: Shape, tensor: int) -> bool:
    """Whether TP of this degree can split heads and MLP; too few key/value heads are replicated."""
    groups = shape.kv_heads
    widths = [shape.heads, shape.ffn]
    if shape.mixture:
        widths.append(shape.mixture.shared)
    widths += [width for mixer in (shape.latent, shape.linear) if mixer for width in mixer.cut()]
    return not any(width % tensor for width in widths) and (groups % tensor == 0 or tensor % groups == 0)


def expert_sizes(shape: Shape, ranks: int) -> list[int]:
    """Numbers of ranks of a pipeline stage's ``ranks`` that can share the experts of its layers."""
    return divisors(gcd(shape.mixture.experts, ranks)) if shape.mixture else [1]


def zero_stages(grid: Strategy, limits: Limits = Limits()) -> list[int]:
    """The allowed stages of ZeRO, which need a group to split over; 2 and 3 exclude pipeline stages."""
    stages = [0] if grid.group("dp").size == 1 else [0, 1] if grid.pipeline > 1 else [0, 1, 2, 3]
    if limits.zero is None:
        return stages
    # With a group of one rank, stage 1 is accepted and has no effect.
    return [stage for stage in limits.zero if stage <= 1 or grid.pipeline == 1]


def savings(grid: Strategy, workload: Workload, limits: Limits = Limits()) -> Iterator[Strategy]:
    """``grid`` with every combination of recompute, offloading and chunks; the first has none of them."""
    if allowed(0, limits.fpdt_chunk):
        yield from _without_fpdt(grid, workload, limits)
    for recompute in chosen(("none", "full"), limits.recompute):
        yield from _with_fpdt(grid.but(recompute=recompute), workload, limits)
    for blocks in _block_recompute(grid.but(recompute="full"), workload, limits, QUARTERS):
        yield from (strategy for strategy in _with_fpdt(blocks, workload, limits) if not strategy.fpdt_offload)
    yield from _in_units(grid, workload, limits)


def _chunk_choices(grid: Strategy, workload: Workload, limits: Limits) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(numbers of chunks of the loss, of the FFN) to choose from."""
    rows = chunks_of(workload, grid).all_rows
    losses, runs = ceil(rows / LOSS_CHUNK_TOKENS), ceil(rows / FFN_CHUNK_TOKENS)
    return (
        (0, losses) if limits.loss_chunks and losses > 1 else (0,),
        (0, runs) if limits.ffn_chunks and runs > 1 else (0,),
    )


def _without_fpdt(grid: Strategy, workload: Workload, limits: Limits) -> Iterator[Strategy]:
    """Block recompute has a chunked loss, which costs almost no time."""
    losses, runs = _chunk_choices(grid, workload, limits)
    for recompute in chosen(("none", "selective", "full"), limits.recompute):
        for ffn_chunks, loss_chunks in product(runs, losses):
            strategy = grid.but(recompute=recompute, loss_chunks=loss_chunks, ffn_chunks=ffn_chunks)
            yield strategy
            if recompute == "full":
                yield strategy.but(keep_attention=True)
            if recompute == "full" and limits.offload:
                yield strategy.but(offload_checkpoints=True)
                yield strategy.but(offload_checkpoints=True, keep_attention=True)
    for blocks in _block_recompute(grid.but(recompute="full", loss_chunks=losses[-1]), workload, limits, EIGHTHS):
        yield from (blocks.but(ffn_chunks=ffn_chunks) for ffn_chunks in runs)


def _in_units(grid: Strategy, workload: Workload, limits: Limits) -> Iterator[Strategy]:
    """Full recompute in units of several layers, with and without FPDT. Layer by layer it is at least as fast.

    Models with several kinds of layers have no formula for it, nor for block recompute.
    """
    layers = grid.most_layers(workload.shape.layers)
    if not allowed("full", limits.recompute) or workload.shape.mixed:
        return
    losses, runs = _chunk_choices(grid, workload, limits)
    for unit in UNITS:
        if not _units_fit(unit, layers, grid):
            continue
        units = grid.but(recompute="full", recompute_layers=unit)
        if allowed(0, limits.fpdt_chunk):
            for ffn_chunks, offload in product(runs, (False, True) if limits.offload else (False,)):
                yield units.but(loss_chunks=losses[-1], ffn_chunks=ffn_chunks, offload_checkpoints=offload)
        yield from _with_fpdt(units, workload, limits)


def _units_fit(unit: int, layers: int, grid: Strategy) -> bool:
    """Whether every stage consists of two or more complete units; ``layers``: of the longest stage."""
    ends = {layers, layers - grid.first_less, layers - grid.last_less}
    if grid.uneven and grid.virtual > 1:
        return False
    return unit < min(ends) and not any(stage // grid.virtual % unit for stage in ends)


def _block_recompute(grid: Strategy, workload: Workload, limits: Limits, eighths: Iterable[int]) -> Iterator[Strategy]:
    """Full recompute of some layers of a stage (block)."""
    layers = grid.most_layers(workload.shape.layers)
    if allowed("block", limits.recompute) and grid.virtual == 1 and not workload.shape.mixed:
        shortest = layers - max(grid.first_less, grid.last_less)
        for again in sorted({ceil(layers * part / 8) for part in eighths}):
            if again < shortest:
                yield grid.but(recompute_method="block", recompute_layers=again)


def _with_fpdt(grid: Strategy, workload: Workload, limits: Limits) -> Iterator[Strategy]:
    least = grid.ring * grid.ulysses * grid.tensor
    streams = grid.pipeline == 1 and not (workload.keys and grid.micro_batch > 1)
    for chunk in FPDT_CHUNKS if limits.fpdt_chunk is None else limits.fpdt_chunk:
        if not least <= chunk <= workload.seq_length:
            continue
        for offload in (False, True) if limits.offload else (False,):
            for checkpoints in (False, True) if limits.offload else (False,):
                yield grid.but(fpdt_chunk=chunk, fpdt_offload=offload, offload_checkpoints=checkpoints)
        if limits.offload and streams:
            yield grid.but(fpdt_chunk=chunk, stream_hidden=True)


def on_grid(saving: Strategy, base: Strategy, workload: Workload) -> Strategy | None:
    """The memory savings of ``saving``, which has one pipeline stage, on the grid ``base``; None: they do not apply."""
    if base.pipeline * base.virtual > 1:
        if saving.stream_hidden:
            return None
        layers = base.most_layers(workload.shape.layers)
        if saving.recompute == "full" and saving.recompute_method == "block":
            again = ceil(saving.recompute_layers / base.pipeline)
            if base.virtual > 1 or again >= layers - max(base.first_less, base.last_less):
                return None
            saving = saving.but(recompute_layers=again)
        elif saving.recompute_layers > 1 and not _units_fit(saving.recompute_layers, layers, base):
            return None
    of_the_grid = ("data", "pipeline", "virtual", "zero", "first_less", "last_less")
    return saving.but(**{name: getattr(base, name) for name in of_the_grid})


def within(grid: Strategy, limits: Limits) -> bool:
    """Whether the limits allow a grid, its micro-batch and virtual stages."""
    names = ("tensor", "ulysses", "ring", "data", "pipeline", "virtual", "micro_batch", "expert")
    return all(allowed(getattr(grid, name), getattr(limits, name)) for name in names)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def allowed(value: int | str, choice: tuple | None) -> bool:
    return choice is None or value in choice


def chosen(values, choice: tuple | None) -> list:
    return [value for value in values if allowed(value, choice)]
