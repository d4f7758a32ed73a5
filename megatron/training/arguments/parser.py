# SPDX-License-Identifier: Apache-2.0
"""From a command line to a :class:`Config`. The parser is built from the dataclasses in settings/."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field
from difflib import get_close_matches
from functools import cache
from typing import Any

from megatron.training.arguments.argv import flat, options, plain
from megatron.training.arguments.dry_run_flags import complete_dry_run, processes
from megatron.training.arguments.elastic import Fastest, choose_grid
from megatron.training.arguments.foreign import megatron_flags
from megatron.training.arguments.foreign.foreign_flags import translate
from megatron.training.arguments.schedule import SCHEDULE, link_stages, read_schedule
from megatron.training.arguments.suggest import explained
from megatron.training.arguments.validate import complete
from megatron.training.families.named import preset
from megatron.training.refusal import LEAVE_OUT, Fix, Gather, Refusal, Unreadable, one_line, raise_all, short
from megatron.training.settings.attention_settings import MASKS
from megatron.training.settings.config import Config
from megatron.training.settings.flag import ALWAYS, name_of, names_with, reader_of, tokens
from megatron.training.settings.same_network import attention_settings, shown
from megatron.training.untrusted.largest_numbers import MOST, most

# With --finetune and a longer sequence than the checkpoint's, these flags win: they stretch its positions.
POSITIONS = ("position_embedding_type", "rotary_base", "rotary_percent")
ShapeOf = Callable[[str, int | None, bool], dict[str, Any] | None]


def take_checkpoint_args(config: Config, given: Collection[str], shape_of: ShapeOf) -> None:
    """Copy the settings of the checkpoint in ``--load``, or else in ``--pretrained-checkpoint``, into ``config``.

    Changes are added to ``config.notes``. If there is no checkpoint yet, the flags are used, as in Megatron-LM.

    Args:
        given: settings that flags set, as "section.field".
        shape_of: see :func:`megatron.training.checkpoint.arguments_of.shape_of`.

    Raises:
        Refusal: no folder is given, or the checkpoint does not describe its model.
    """
    settings = config.checkpoint
    if settings.load is None and settings.pretrained_checkpoint is None:
        raise Refusal("--use-checkpoint-args", "needs a checkpoint: give --load or --pretrained-checkpoint")
    saved = None
    if settings.load:
        saved = shape_of(settings.load, settings.ckpt_step, settings.skip_damaged_checkpoints)
    folder = settings.load
    if saved is None and settings.pretrained_checkpoint:
        folder, saved = settings.pretrained_checkpoint, shape_of(settings.pretrained_checkpoint, None, False)
    if saved is None:
        config.notes.append(f"--use-checkpoint-args: {folder} has no checkpoint yet, so the flags are used")
        return
    overridden, mask, stretched = [], [], _longer_than(saved, config, given)
    wins = names_with(config.model, "loaded", ALWAYS)
    for name, value in _with_mask_of(config, given, saved).items():
        section = "data" if name == "seq_length" else "attention" if name in attention_settings() else "model"
        part = getattr(config, section)
        if not hasattr(part, name):
            continue
        is_given = f"{section}.{name}" in given
        if is_given and (name not in wins or (stretched and name in POSITIONS)):
            continue
        if is_given and getattr(part, name) != value:
            overridden.append(f"{name.replace('_', '-')} {getattr(part, name)} -> {value}")
        if section == "attention" and getattr(part, name) != value:
            mask.append(f"--{name.replace('_', '-')} {shown(value)}")
        setattr(part, name, value)
    config.notes.append(f"--use-checkpoint-args: the model as in {folder}{', with ' * bool(mask)}{' '.join(mask)}")
    if stretched:
        _stretch(config, given, saved, stretched)
    if overridden:
        config.notes.append(f"--use-checkpoint-args: the checkpoint overrides flags: {', '.join(overridden)}")


def _with_mask_of(config: Config, given: Collection[str], saved: dict[str, Any]) -> dict[str, Any]:
    """The settings ``saved``, without those of a mask that --attention-mask replaces.

    Raises:
        Refusal: the mask is a function of another file, which a checkpoint must not choose.
    """
    mask = config.attention.attention_mask if "attention.attention_mask" in given else None
    if mask is None and saved.get("attention_mask") == "function":
        raise Refusal(
            "--use-checkpoint-args",
            f": the checkpoint's mask is a function, {short(saved.get('mask_function'))}, and a checkpoint must not "
            "choose code to run: give --attention-mask function --mask-function FILE.py:NAME, a file you trust",
        )
    if mask not in (None, "document"):
        replaced = {*attention_settings()} - {*MASKS[mask].flags}
    else:  # causal and window follow from --window-size, which a flag may change
        replaced = {"attention_mask"} if saved.get("attention_mask") in (None, "causal", "window") else set()
    return {name: value for name, value in saved.items() if name not in replaced}


def _longer_than(saved: dict[str, Any], config: Config, given: Collection[str]) -> int:
    """The length that a checkpoint was trained with, if flags stretch its rotary positions beyond it; else 0."""
    trained, length = saved.get("seq_length") or saved.get("max_position_embeddings") or 0, config.data.seq_length
    if not config.checkpoint.finetune or "data.seq_length" not in given or length <= trained:
        return 0
    kinds = {saved.get("position_embedding_type")}
    if "model.position_embedding_type" in given:
        kinds.add(config.model.position_embedding_type)
    return trained if kinds <= {"rope", "yarn"} and any(f"model.{name}" in given for name in POSITIONS) else 0


def _stretch(config: Config, given: Collection[str], saved: dict[str, Any], trained: int) -> None:
    """Set what a longer context needs and no flag gives: the longest position, and YaRN's original length."""
    model = config.model
    changed = [name for name in POSITIONS if f"model.{name}" in given and saved.get(name) != getattr(model, name)]
    what = ", ".join(f"{name.replace('_', '-')} {saved.get(name)} -> {getattr(model, name)}" for name in changed)
    if "model.max_position_embeddings" not in given:
        model.max_position_embeddings = config.data.seq_length
    yarn = "model.yarn_original_max_position_embeddings"
    if model.position_embedding_type == "yarn" != saved["position_embedding_type"] and yarn not in given:
        model.yarn_original_max_position_embeddings = trained
        what += f", yarn-original-max-position-embeddings {trained}"
    what = f": {what}" if what else ""
    config.notes.append(f"--use-checkpoint-args: flags extend {trained} to {config.data.seq_length} tokens{what}")


LARGEST = 2**53  # the longest runs have less than 2**45 tokens; PyTorch takes no number above 2**63
USAGE = "%(prog)s --model NAME | --num-layers N --hidden-size N ... [flags]"
EPILOG = (
    "Megatron-LM's other flags are known by name: those that cannot change the result are accepted with a note, "
    "the rest are refused with the reason. Flags win over --model, --model wins over the defaults."
)


def parse(
    argv: list[str] | None = None,
    defaults: dict[str, Any] | None = None,
    world_size: int | None = None,
    shape_of: ShapeOf | None = None,
    fastest: Fastest | None = None,
    iteration: int = 0,
) -> Config:
    """Read a command line; with ``world_size``, also complete and check it.

    Flags that are given win over the shape of ``--model``. The shape wins over the entry point's ``defaults``, which
    win over the defaults of the dataclasses. ``--help`` prints and exits.

    Args:
        argv: the words after the program's name; None reads them from ``sys.argv``.
        defaults: {"section.field": value}.
        world_size: number of processes; a dry run has its own --world-size.
        shape_of: reads a checkpoint's model; without it, --use-checkpoint-args is ignored.
        fastest: chooses among grids, for --elastic with --gpu.
        iteration: the last finished one, for --seq-length-schedule: the stage that goes on from there is returned, and
            all stages are checked.

    Raises:
        Refusal: anything that cannot be read or is not supported.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _read(given, defaults, world_size, shape_of, fastest, iteration)
    except Refusal as refusal:
        shown = explained(refusal, given, lambda words: _read(words, defaults, world_size, shape_of))
    raise shown


def _read(
    argv: list[str],
    defaults: dict[str, Any] | None,
    world_size: int | None,
    shape_of: ShapeOf | None,
    fastest: Fastest | None = None,
    iteration: int = 0,
) -> Config:
    """Read a command line; complete and check it if all of its words can be read."""
    gather = Gather()
    words = plain(argv, *_kinds())
    namespace, unread = _namespace(words, gather)
    given = dict(vars(namespace))
    others = given.pop("others", [])
    given.pop("spelled", None)
    gather.check("known", lambda: megatron_flags.refuse_unknown(unread, supported_flags(), words))
    notes = gather.check("judged", lambda: megatron_flags.judge(others))
    gather.check("values", lambda: _check_values(given))
    if "data.seq_length_schedule" in given and world_size is not None:
        gather.finish()
        stages = _stages(words, given, lambda line, more: _read(line, more, world_size, shape_of, fastest), defaults)
        return [stage for stage in stages if stage.stage.start <= iteration][-1]
    named = given.get("model.model") or (defaults or {}).get("model.model")
    shape = gather.check("model", lambda: preset(named)) if named else {}
    gather.finish()

    config = Config(notes=notes)
    for name, value in {**(defaults or {}), **shape, **given}.items():
        section, field = name.split(".")
        if not hasattr(getattr(config, section), field):
            raise KeyError(f"no setting {name}")
        setattr(getattr(config, section), field, list(value) if isinstance(value, list) else value)
    translate(config, given)
    if "--no-position-embedding" in dict(others) and config.model.position_embedding_type == "learned_absolute":
        raise Refusal(
            "--no-position-embedding",
            ": use --position-embedding-type none, or rope",
            Fix("--position-embedding-type none"),
        )
    megatron_flags.refuse_with_experts(others, config.model.num_experts)
    megatron_flags.refuse_other_weights(others, config.model)
    if config.checkpoint.use_checkpoint_args and shape_of is not None:
        take_checkpoint_args(config, given, shape_of)
    if world_size is None:
        return config
    config = complete_dry_run(config, world_size)
    return complete(choose_grid(config, processes(config, world_size), complete, fastest), world_size)


def _stages(
    words: list[str],
    given: Mapping[str, Any],
    read: Callable[[list[str], dict[str, Any]], Config],
    defaults: dict[str, Any] | None,
) -> list[Config]:
    """The configuration of each stage of --seq-length-schedule: the command line with the stage's length and flags.

    Args:
        given: the settings of the command line.
        read: reads and completes a command line with other defaults.

    Raises:
        Refusal: of a stage, if it is not one of all stages; it names the stage.
    """
    if "data.seq_length" in given:
        raise Refusal(f"--seq-length and {SCHEDULE}", "both give the length: leave --seq-length out")
    stages = read_schedule(given["data.seq_length_schedule"])
    defaults = {**(defaults or {}), "model.max_position_embeddings": max(length for _, length, _ in stages)}
    common = flat(option for option in options(words) if option[0] != SCHEDULE)
    of_a_stage = [f"{section}.{field.name}" for section, _, field in settings() if field.metadata.get("stage")]
    configs, refused = [], []
    for _, length, flags in stages:
        try:
            names = _namespace(plain(flags, *_kinds()), Gather())[0]
            own = [name for name in vars(names) if name != "spelled" and name not in of_a_stage]
            if own or len(flags) and not flags[0].startswith("-"):
                raise Refusal(shlex.join(flags), "cannot be of one stage alone: give it for the run")
            configs.append(read([*common, "--seq-length", str(length), *flags], defaults))
            refused.append({})
        except Refusal as refusal:
            refused.append({str(part): part for part in refusal.parts})
    for (start, _, _), parts in zip(stages, refused):
        for line in list(parts):
            if not all(line in others for others in refused):
                parts[line] = Refusal(f"stage from iteration {start} of {SCHEDULE}: {line}")
    raise_all(part for parts in refused for part in parts.values())
    return link_stages(configs, [start for start, _, _ in stages])


def _namespace(words: list[str], gather: Gather) -> tuple[argparse.Namespace, list[str]]:
    """What argparse reads, and the words that belong to no flag. Unreadable values are refused and left out."""
    while True:
        try:
            return build_parser().parse_known_args(words)
        except Refusal as refusal:  # two spellings of one setting
            gather.refusals += refusal.parts
            gather.finish()
        except argparse.ArgumentError as error:
            flags = (error.argument_name or "").split("/")
            reason = one_line(error.message)
            flag = next((option[0] for option in options(words) if option[0] in flags), flags[0])
            gather.refusals.append(Unreadable(flag, f": {reason}"))
            others = [option for option in options(words) if option[0] not in flags]
            if len(others) == len(options(words)):
                gather.finish()
            words = flat(others)


@cache
def _kinds() -> tuple[set[str], set[str], set[str], set[str], set[str]]:
    """(flags without a value, those of them that state the default, flags with numbers, with words, with a pair)."""
    table = megatron_flags.rows().items()
    switches = {flag for flag, row in table if row.values == "0"} | set(megatron_flags.SPELLINGS)
    defaults = {flag for flag, (name, value) in megatron_flags.SPELLINGS.items() if value is True}
    lists = {flag for flag, row in table if row.values in "+*"}
    numbers, pairs = set(), set()
    for _, _, field in settings():
        flags = spellings(field)
        if field.type == "bool":
            switches.update(flags)
            if field.default and "flags" not in field.metadata:
                defaults.update(flags)
        elif field.type.startswith("tuple"):
            pairs.update(flags)
        elif field.metadata.get("nargs"):
            (numbers if reader_of(field) is int else lists).update(flags)
    return switches, defaults, numbers, lists, pairs


def settings() -> Iterator[tuple[str, str, Field]]:
    """Every setting as (section, its description, field)."""
    for section, part, field in Config().settings():
        yield section, (type(part).__doc__ or "").splitlines()[0].replace("``", ""), field


def spellings(field: Field) -> list[str]:
    """Every spelling of a setting's flag; the first is its name."""
    return [name_of(field), *field.metadata.get("flags", [])[1:], *field.metadata.get("aliases", [])]


@cache
def supported_flags() -> list[str]:
    """Every flag that sets a setting."""
    return [*(flag for _, _, field in settings() for flag in spellings(field)), *megatron_flags.SPELLINGS]


@cache
def build_parser() -> argparse.ArgumentParser:
    """The parser. Its namespace holds only what was given; flags of other programs are listed in ``others``."""
    parser = _Parser(
        usage=USAGE,
        epilog=EPILOG,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=120),
    )
    groups: dict[str, Any] = {}
    for section, about, field in settings():
        group = groups.get(section)
        if group is None:
            group = groups[section] = parser.add_argument_group(about.rstrip("."))
        _add(group, section, field)
    for flag, (name, value) in megatron_flags.SPELLINGS.items():
        parser.add_argument(flag, dest=name, action="store_const", const=value, help=argparse.SUPPRESS)
    counts = {"0": 0, "1": 1, "3": 3, "+": "+", "*": "*"}
    for flag, row in megatron_flags.rows().items():
        parser.add_argument(flag, dest="others", action=_Note, nargs=counts[row.values], help=argparse.SUPPRESS)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are refusals."""

    def error(self, message: str) -> Any:
        raise Refusal(" ".join(message.removeprefix("argument ").split()))


class _Note(argparse.Action):
    """Keeps (flag, values) in the order given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        listed = [*getattr(namespace, self.dest, []), (option_string, [] if values is None else list(values))]
        setattr(namespace, self.dest, listed)


class _Store(argparse.Action):
    """Keeps the last value of a flag; two spellings of one setting must agree."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        spelled = dict(getattr(namespace, "spelled", {}))
        other, value = spelled.get(self.dest, (option_string, values))
        if other != option_string and value != values:
            raise Refusal(f"{other} and {option_string}", "are two spellings of one setting, and differ: leave one out")
        namespace.spelled = {**spelled, self.dest: (option_string, values)}
        setattr(namespace, self.dest, values)


def _add(group: Any, section: str, field: Field) -> None:
    meta, text = field.metadata, field.metadata["help"]
    dest = f"{section}.{field.name}"
    if field.type == "bool":
        switches_off = field.default and "flags" in meta  # a setting that is on by default has flags that switch it off
        group.add_argument(*spellings(field), dest=dest, action="store_const", const=not switches_off, help=text)
        return
    kind = reader_of(field)
    metavar = {int: "N", tokens: "N", float: "X", str: "TEXT"}.get(kind, "LEFT,RIGHT")
    if choices := meta.get("choices"):
        metavar = "{" + ",".join(map(str, choices)) + "}"
    if isinstance(field.default, (int, float, str)):
        text += f" (default {field.default:g})" if isinstance(field.default, float) else f" (default {field.default})"
    group.add_argument(
        *spellings(field),
        dest=dest,
        action=_Store,
        type=number if kind is float else kind,
        nargs=meta.get("nargs"),
        metavar=metavar,
        help=text.replace("%", "%%"),
    )


def number(text: str) -> float:
    """A finite float."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _check_values(given: dict[str, Any]) -> None:
    refused = []
    for section, _, field in settings():
        value, choices = given.get(f"{section}.{field.name}"), field.metadata.get("choices")
        flag, numbers = spellings(field)[0], value if isinstance(value, list) else [value]
        if value == "" and section != "logging" or value == [] and not field.metadata.get("nargs"):
            # For example from an empty shell variable.
            refused.append(Unreadable(flag, "has no value: give one, or leave it out", LEAVE_OUT))
        elif choices is not None and value is not None and value not in choices:
            fixes = [Fix(f"{flag} {choices[0]}")] if len(choices) == 1 else []
            close = get_close_matches(str(value).lower(), [str(choice).lower() for choice in choices], 1)
            meant = next((f"did you mean {name}? " for name in choices if str(name).lower() in close), "")
            named = ", ".join(map(str, choices))
            refused.append(Refusal(f"{flag} {value}", f": not supported; {meant}choose from {named}", *fixes))
        elif any(isinstance(number, int) and abs(number) > LARGEST for number in numbers):
            refused.append(Refusal(f"{flag} {value}", ": exceeds 2**53; use a smaller number"))
        elif section == "model" or field.name in MOST:
            if any(isinstance(number, int | float) and abs(number) > most(field.name) for number in numbers):
                refused.append(Refusal(f"{flag} {value}", f": exceeds {most(field.name):,}; use a smaller number"))
    raise_all(refused)
