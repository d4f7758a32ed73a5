# SPDX-License-Identifier: Apache-2.0
"""The parser of the programs in tools/: an error is one line, with the option or choice that was probably meant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

from megatron.training.refusal import Refusal, nearest, printable


def in_one_line(*errors: type[Exception]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorates a main function: errors of these kinds end it with one line on standard error, and exit code 2."""

    def decorated(main: Callable[..., int]) -> Callable[..., int]:
        @wraps(main)
        def program(*args: Any, **options: Any) -> int:
            try:
                return main(*args, **options)
            except errors as error:
                of_file = isinstance(error, OSError) and error.filename
                print(f"error: {f'{of_file}: {error.strerror}' if of_file else error}", file=sys.stderr)
                return 2

        return program

    return decorated


class OptionParser(argparse.ArgumentParser):
    """A parser that ends the program with one line about an error, where argparse prints the complete usage."""

    def __init__(self, description: str | None = None, **options: Any) -> None:
        super().__init__(
            description=description, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options}
        )
        self.words: list[str] = []

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """As argparse's; keeps the words, because argparse names missing options and stops before wrong ones."""
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End the program with one line."""
        self.exit(2, f"error: {printable(self.explain(message))}\n")

    def explain(self, message: str) -> str:
        """The message, after what each option that does not exist probably means."""
        words = self.words[: self.words.index("--")] if "--" in self.words else self.words
        names = [name for name in self._option_string_actions if name.startswith("--")]
        given = dict.fromkeys(word.split("=")[0] for word in words if word.startswith("--"))
        wrong = [name for name in given if not any(option.startswith(name) for option in names)]
        guesses = [f"{name} is not an option; did you mean {nearest(name, names)}?" for name in wrong]
        rest = [] if guesses and message.startswith("unrecognized") else [message]
        return "; ".join(guesses + rest)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action, f"{value} is not supported; did you mean {nearest(str(value), choices)}? choose from "
                f"{', '.join(choices)}"
            )  # fmt: skip


class RefusingParser(OptionParser):
    """One whose errors are Refusals, and which takes no abbreviated options."""

    def __init__(self, description: str | None = None, **options: Any) -> None:
        super().__init__(description, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise the line."""
        raise Refusal(self.explain(message))
