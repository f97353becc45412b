"""What every command says to its user, and how: one line why, and how far it is."""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

EXIT_CODES = {"conformant": 0, "divergent": 1, "undecided": 2}

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def fail(message: str, *, as_json: bool = False) -> NoReturn:
    """End with exit code 2 and one line that says why."""
    click.echo(f"mustfit: {message}", err=True)
    if as_json:
        click.echo(json.dumps({"verdict": "undecided", "reason": message}))
    sys.exit(EXIT_CODES["undecided"])


class FiniteRange(click.FloatRange):
    """A number in some range; infinity and what is no number are in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number.

        Raises:
            click.BadParameter: It is none, or not in the range.
        """
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class PlainConsole(Console):
    """A console whose reader may leave without changing what the verdict is taken for."""

    def on_broken_pipe(self) -> None:
        """Raises, where rich would exit with a code of its own."""
        raise BrokenPipeError


@contextmanager
def progress(
    total: int | None, *, what: str = "scenarios"
) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """A progress bar on stderr, if that is a terminal; else a line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(total, what)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield (
            lambda message: bar.update(task, description=message),
            lambda done: bar.update(task, completed=done),
        )


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], None]]:
    """An interrupt (Ctrl-C) waits until the function is called, which then raises it.

    So it finds no work half done. A second one doesn't wait.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, _: object) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, before)

    def raise_it() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield raise_it
    finally:
        signal.signal(signal.SIGINT, before)


#: Seconds between two lines of progress where there is no terminal.
QUIET = 10.0


def _lines(total: int | None, what: str) -> tuple[Callable[[str], None], Callable[[int], None]]:
    last = [time.monotonic()]

    def advance(done: int) -> None:
        if time.monotonic() - last[0] > QUIET:
            last[0] = time.monotonic()
            click.echo(f"mustfit: {done} of {total or 'all'} {what}", err=True)

    return lambda message: click.echo(f"mustfit: {message}", err=True), advance
