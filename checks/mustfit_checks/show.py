"""What a person sees of a verdict, in a terminal."""

from __future__ import annotations

from pathlib import Path

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mustfit_checks.judge import Divergence, Verdict
from mustfit_checks.measured import Measurement
from mustfit_checks.mutants import MUTANTS
from mustfit_spec import Config, NewRequest, Operation, Rule, Scenario, Scheduler, rules_of

STYLE = {"conformant": "bold green", "divergent": "bold red", "undecided": "bold yellow"}
#: Tokens of a prompt that are shown before the rest is only counted.
SHOWN_TOKENS = 12


@attrs.frozen(kw_only=True)
class Report:
    """A verdict and what is to be said with it.

    Attributes:
        result: The verdict.
        revision: The revision that it was judged by.
        files: For each divergence, where its case was saved, if it could be.
        notes: Further lines, such as where the scenario was saved that nobody answered.
        repeat: The command that repeats the run.
        sampled: Whether the scenarios were generated, so that it matters what they reached.
    """

    result: Verdict
    revision: type[Scheduler]
    files: list[Path | None]
    notes: list[str]
    repeat: str
    sampled: bool


def verdict(console: Console, report: Report) -> None:
    """The verdict, each kind of divergence with its case, and the rules that were exercised."""
    result = report.result
    for divergence, file in zip(result.divergences, report.files, strict=True):
        _divergence(console, divergence, report.revision, file)
    decided = result.verdict != "undecided"
    if decided and report.sampled:
        _exercised(console, result)
    if result.scenarios:
        judge = result.against if ":" in result.against else f"vLLM {result.against}"
        _line(
            console,
            f"[{STYLE[result.verdict]}]{result.verdict}[/]: {escape(result.sut)} against "
            f"{judge} at profile {result.profile}: {result.scenarios:,} scenarios, "
            f"{result.steps:,} steps, {result.diverged:,} divergent; "
            f"{result.scenarios / max(result.seconds, 1e-9):,.0f} scenarios a second",
        )
    else:
        _line(console, f"[{STYLE[result.verdict]}]{result.verdict}[/]: {escape(result.sut)}")
    if result.reason:
        _line(console, escape(result.reason))
    for note in report.notes:
        _line(console, escape(note))
    if decided and report.sampled and result.never_exercised:
        names = ", ".join(result.never_exercised)
        _line(console, f"never exercised, so nothing is said about: {names}")
    _line(console, f"repeat with: {escape(report.repeat)}")


def _line(console: Console, text: str) -> None:
    """One line, whatever the width: lines are for grep as well."""
    console.print(text, highlight=False, soft_wrap=True)


def _exercised(console: Console, result: Verdict) -> None:
    """How many scenarios exercised each rule, in columns."""
    per_line = max(console.width // 32, 1)
    table = Table.grid(padding=(0, 2))
    for _ in range(per_line):
        table.add_column()
        table.add_column(justify="right")
    cells = [(rule_id, f"{count:,}") for rule_id, count in result.rules.items()]
    rows = -(-len(cells) // per_line)
    for row in range(rows):
        table.add_row(*(part for cell in cells[row::rows] for part in cell))
    console.print("scenarios that exercised each rule:", style="dim")
    console.print(table)


def _divergence(
    console: Console, divergence: Divergence, revision: type[Scheduler], file: Path | None
) -> None:
    console.rule(f"[bold]{divergence.rule or 'the scheduler failed'}[/]", align="left")
    rule: Rule | None = rules_of(revision).get(divergence.rule or "")
    if rule is not None:
        _line(
            console,
            f"{escape(rule.statement)} [dim](docs/semantics.md, vLLM {escape(rule.source)})[/]",
        )
    if divergence.behaves_like is not None:
        mutant = MUTANTS[divergence.behaves_like]
        seen = f", seen in {mutant.seen_in}" if mutant.seen_in else ""
        _line(
            console,
            f"behaves like [bold]{mutant.name}[/]{seen}: {escape(mutant.description)}",
        )
    elif rule is not None:
        _line(console, "no known wrong scheduler does this; the rule is a guess by what differs")
    scenario(console, divergence.scenario)
    difference = divergence.difference
    _line(console, f"step {difference.step}, {difference.field}:")
    _line(console, f"  expected  {escape(_plain(difference.expected))}")
    _line(console, f"  observed  {escape(_plain(difference.observed))}")
    found = ", ".join(divergence.found_in[:3])
    more = len(divergence.found_in) - 3
    saved = f"; saved as {file}" if file is not None else ""
    _line(
        console,
        f"found in {escape(found)}{f' and {more} more' if more > 0 else ''}{escape(saved)}",
    )


def _plain(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_plain(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) + "}"
    return str(value)


def scenario(console: Console, shown: Scenario) -> None:
    """A scenario, with what is not at its default, and operations in one line."""
    _line(console, f"  {escape(_set_fields(shown.config))}")
    for request in shown.requests:
        _line(console, f"  {escape(_request(request))}")
    _line(console, f"  {escape(operations(shown.operations))}")


def _set_fields(config: Config) -> str:
    return " ".join(
        f"{field.name}={getattr(config, field.name)}"
        for field in attrs.fields(Config)
        if getattr(config, field.name) != field.default
    )


def _request(request: NewRequest) -> str:
    parts = [
        f"{request.request_id}:",
        f"prompt {_tokens(request.prompt_token_ids)},",
        f"samples {_tokens(request.sampled_token_ids)}",
    ]
    for field in attrs.fields(NewRequest):
        value = getattr(request, field.name)
        if field.default is not attrs.NOTHING and value != field.default:
            parts.append(f"{field.name}={_plain(value)}")
    return " ".join(parts)


def _tokens(tokens: tuple[int, ...]) -> str:
    shown = " ".join(str(token) for token in tokens[:SHOWN_TOKENS])
    if len(tokens) > SHOWN_TOKENS:
        return f"({shown} ..., {len(tokens)} tokens)"
    return f"({shown})"


def operations(done: tuple[Operation, ...]) -> str:
    """Operations in one line; steps in a row are counted."""
    words: list[str] = []
    steps = 0
    for operation in (*done, None):
        if operation is not None and operation.op == "step":
            steps += 1
            continue
        if steps:
            words.append("step" if steps == 1 else f"{steps} steps")
            steps = 0
        if operation is not None:
            words.append(_operation(operation))
    return ", ".join(words)


def _operation(operation: Operation) -> str:
    if operation.op == "reset_prefix_cache":
        running = " (reset_running_requests)" if operation.reset_running_requests else ""
        return operation.op + running
    return f"{operation.op} {operation.request_id}"


def measurement(row: Measurement) -> str:
    """What was measured of a release, in a few words."""
    return (
        f"{row.release} ({row.scenarios:,} scenarios, {row.steps:,} steps at {row.profile}, "
        f"seed {row.seed})"
    )
