"""The command ``mustfit replay``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs
import click
from rich.table import Table

from mustfit_checks.console import EXIT_CODES, FiniteRange, PlainConsole, as_json, fail, progress
from mustfit_checks.mooncake import TRACE_BLOCK_SIZE, TraceLineError, read
from mustfit_checks.replay import Clock, Replay, Replayed, Timeline
from mustfit_impl import NEWEST, REVISIONS, Config, ConfigError, Scheduler

Gate = Literal["on", "off"]

#: What a replay says, in words, and how to get at it.
ROWS: tuple[tuple[str, Callable[[Replayed], str]], ...] = (
    ("requests", lambda r: f"{r.requests:,}"),
    ("finished", lambda r: f"{r.finished:,}"),
    ("left", lambda r: f"{r.left:,}"),
    ("steps", lambda r: f"{r.steps:,}"),
    ("preemptions", lambda r: f"{r.preemptions:,}"),
    ("tokens computed", lambda r: f"{r.scheduled_tokens:,}"),
    ("of these, again", lambda r: f"{r.recomputed_tokens:,}"),
    (
        "longest wait at the head",
        lambda r: (
            f"{r.longest_head_wait_steps:,} steps"
            + (f" ({r.longest_head_wait})" if r.longest_head_wait else "")
        ),
    ),
    ("simulated time", lambda r: f"{r.simulated_us / 1e6:,.1f} s"),
    ("time", lambda r: f"{r.seconds:.3f} s"),
)


def pool_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say what scheduler is used, by vLLM's names."""
    options = (
        click.option("--num-gpu-blocks", type=click.IntRange(2, 1_000_000), default=300),
        click.option("--block-size", type=click.IntRange(1), default=512),
        click.option("--max-model-len", type=click.IntRange(2), default=131_072),
        click.option("--max-num-seqs", type=click.IntRange(1), default=256),
        click.option("--max-num-batched-tokens", type=click.IntRange(1), default=8192),
        click.option(
            "--trace-block-size",
            type=click.IntRange(1),
            default=TRACE_BLOCK_SIZE,
            help="Tokens that a hash id of the trace stands for.",
        ),
        click.option(
            "--step-ms",
            type=FiniteRange(0.001),
            default=10.0,
            help="How long a step takes, but for its tokens.",
        ),
        click.option(
            "--token-us",
            type=click.IntRange(0),
            default=50,
            help="How much longer it takes for each token that it computes.",
        ),
        click.option("--limit", type=click.IntRange(1), help="Only so many requests."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(context_settings={"show_default": True})
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False, allow_dash=True))
@pool_options
@click.option("--revision", type=click.Choice(list(REVISIONS)), default=NEWEST)
@click.option(
    "--gate",
    type=click.Choice(["on", "off", "both"]),
    default="on",
    help="Whether a request is admitted only if all of it fits (scheduler_reserve_full_isl).",
)
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True)
@click.option("--long-prefill-token-threshold", type=click.IntRange(0), default=0)
@click.option("--watermark", type=FiniteRange(0, 1, max_open=True), default=0.0)
@click.option(
    "--all-at-once", is_flag=True, help="All requests are there at the start, whatever the trace."
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw blocks, requests and preemptions over time, gate on and off, to this file.",
)
@as_json
def replay(
    *,
    trace: Path,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    trace_block_size: int,
    step_ms: float,
    token_us: int,
    limit: int | None,
    revision: str,
    gate: str,
    enable_prefix_caching: bool,
    long_prefill_token_threshold: int,
    watermark: float,
    all_at_once: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay TRACE, in Mooncake's format, on the implementation; `-` is stdin.

    A step takes --step-ms, and --token-us for each token that it computes: round numbers, and no
    model of any GPU. Exit 0 if every request ended, 2 if not.
    """
    gates: tuple[Gate, ...] = ("off",) if gate == "off" else ("on",)
    if gate == "both" or plot is not None:
        gates = ("on", "off")
    if len(gates) > 1 and str(trace) == "-":
        fail(
            "the gate on and off takes two passes, and stdin gives one; use a file", as_json=as_json
        )
    draw = _drawing(plot, as_json=as_json)
    clock = Clock(step_us=round(step_ms * 1000), token_us=token_us)
    results: dict[Gate, Replayed] = {}
    trouble: str | None = None
    for state in gates:
        try:
            config = Config(
                num_gpu_blocks=num_gpu_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                scheduler_reserve_full_isl=state == "on",
                enable_prefix_caching=enable_prefix_caching,
                long_prefill_token_threshold=long_prefill_token_threshold,
                watermark=watermark,
            )
            scheduler = Scheduler(config=config, revision=revision)
        except ConfigError as error:
            fail(str(error), as_json=as_json)
        one = Replay(
            scheduler=scheduler,
            clock=clock,
            trace_block_size=trace_block_size,
            timeline=Timeline() if plot is not None else None,
        )
        results[state] = one.result
        trouble = _run(
            one,
            trace,
            trace_block_size=trace_block_size,
            limit=limit,
            all_at_once=all_at_once,
            say=f"gate {state}",
        )
        if trouble:
            break
    if draw is not None and not trouble:
        trouble = draw(results, num_gpu_blocks - 1)
    _print(results, gates[0], trouble, as_json=as_json)
    sys.exit(EXIT_CODES["undecided" if trouble else "conformant"])


def _run(
    one: Replay,
    trace: Path,
    *,
    trace_block_size: int,
    limit: int | None,
    all_at_once: bool,
    say: str,
) -> str | None:
    """Replays the trace, and says what kept it from its end, if anything did."""
    size = trace.stat().st_size if trace.is_file() else None
    try:
        with progress(size, what="bytes") as (describe, advance):
            describe(say)
            arrivals = read(trace, trace_block_size=trace_block_size, limit=limit, advance=advance)
            if all_at_once:
                arrivals = (attrs.evolve(arrival, at=0) for arrival in arrivals)
            result = one.run(arrivals)
    except TraceLineError as error:
        return str(error)
    except OSError as error:
        return f"cannot read {trace}: {error.strerror}"
    except KeyboardInterrupt:
        return "interrupted"
    if not result.requests:
        return f"{trace} holds no request"
    if result.in_vain:
        return result.in_vain
    return None


def _print(
    results: dict[Gate, Replayed], first: Gate, trouble: str | None, *, as_json: bool
) -> None:
    if as_json:
        said = {gate: _as_json(result) for gate, result in results.items()}
        click.echo(json.dumps({**said[first], "gate": first, "reason": trouble, "gates": said}))
    else:
        table = Table(box=None)
        table.add_column()
        for gate in results:
            table.add_column(f"gate {gate}", justify="right")
        for name, value in ROWS:
            table.add_row(name, *(value(result) for result in results.values()))
        PlainConsole(emoji=False).print(table)
    if trouble:
        click.echo(f"mustfit: {trouble}", err=True)


def _as_json(result: Replayed) -> dict[str, Any]:
    said = attrs.asdict(result, filter=attrs.filters.exclude("timeline", "simulated_us"))
    return {**said, "simulated_seconds": result.simulated_us / 1e6}


def _drawing(
    plot: Path | None, *, as_json: bool
) -> Callable[[dict[Gate, Replayed], int], str | None] | None:
    """What draws the plot, if one is wanted; found out before the work is done."""
    if plot is None:
        return None
    try:
        from mustfit_checks import plot as plotting  # noqa: PLC0415 - takes a second, and matplotlib
    except ModuleNotFoundError:
        fail("--plot needs matplotlib: pip install 'mustfit[plot]'", as_json=as_json)
    if plot.suffix not in plotting.SUFFIXES:
        fail(f"--plot {plot}: give one of {', '.join(plotting.SUFFIXES)}", as_json=as_json)

    def draw(results: dict[Gate, Replayed], num_blocks: int) -> str | None:
        try:
            plotting.draw({f"gate {gate}": r for gate, r in results.items()}, num_blocks, plot)
        except OSError as error:
            return f"cannot write {plot}: {error.strerror}"
        return None

    return draw
