"""The command ``mustfit bench``."""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import attrs
import click
from rich.table import Table

from mustfit_checks.bench import BenchError, Plan, Row, measure, ratios
from mustfit_checks.console import PlainConsole, as_json, fail, progress
from mustfit_checks.growth import Growth, growth
from mustfit_checks.measured import newest_release
from mustfit_checks.mooncake import Arrival, TraceLineError, read
from mustfit_checks.replay import Clock
from mustfit_checks.replay_cli import pool_options
from mustfit_checks.synthetic import write_trace
from mustfit_checks.vllm_setup import SetupError, set_up
from mustfit_checks.work import NeverEnds, Work, recorded
from mustfit_impl import Config, ConfigError


@click.command(context_settings={"show_default": True})
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@pool_options
@click.option(
    "--spec-requests",
    type=click.IntRange(1),
    default=20,
    help="So many of the requests for the comparison with the specification, which is slow.",
)
@click.option(
    "--gate",
    type=click.Choice(["on", "off"]),
    default="on",
    help="Whether a request is admitted only if all of it fits (scheduler_reserve_full_isl).",
)
@click.option("--repeats", type=click.IntRange(1), default=3, help="The median of them counts.")
@click.option(
    "--vllm",
    "release",
    metavar="RELEASE",
    default=newest_release,
    help="The real scheduler to compare with, or `none`.",
)
@click.option(
    "--dynamo-python",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    default=lambda: sys.executable if find_spec("dynamo") else None,
    show_default="this one, if it has",
    help="A Python that has ai-dynamo-runtime.",
)
@click.option(
    "--growth/--no-growth", "with_growth", default=True, help="How costs grow with sizes."
)
@as_json
def bench(
    *,
    trace: Path | None,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    trace_block_size: int,
    step_ms: float,
    token_us: int,
    limit: int | None,
    spec_requests: int,
    gate: str,
    repeats: int,
    release: str,
    dynamo_python: Path | None,
    with_growth: bool,
    as_json: bool,
) -> None:
    """Time the specification, the implementation and the real vLLM on the same work.

    The work is TRACE, in Mooncake's format, or one that is made up and always the same. Everybody
    is given the same requests before the same steps, and has to decide the same in each of them.
    The Dynamo mocker replays the trace by its own clock.
    """
    try:
        config = Config(
            num_gpu_blocks=num_gpu_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            scheduler_reserve_full_isl=gate == "on",
        )
    except ConfigError as error:
        fail(str(error), as_json=as_json)
    clock = Clock(step_us=round(step_ms * 1000), token_us=token_us)
    with tempfile.TemporaryDirectory(prefix="mustfit-bench-") as folder:
        file = Path(folder, "trace.jsonl")
        try:
            if trace is None:
                write_trace(file, requests=limit or 200, block_size=trace_block_size)
                arrivals = list(read(file, trace_block_size=trace_block_size))
            else:
                arrivals = list(read(trace, trace_block_size=trace_block_size, limit=limit))
                lines = trace.read_bytes().splitlines(keepends=True)
                file.write_bytes(b"".join(lines[: arrivals[-1].number]) if arrivals else b"")
        except TraceLineError as error:
            fail(str(error), as_json=as_json)
        except OSError as error:
            fail(f"cannot read {trace}: {error.strerror}", as_json=as_json)
        if not arrivals:
            fail(f"{trace} holds no request", as_json=as_json)
        _bench(
            _plan_of(arrivals, config, clock, trace_block_size, spec_requests, as_json=as_json),
            file,
            release=release,
            dynamo=dynamo_python,
            repeats=repeats,
            with_growth=with_growth,
            as_json=as_json,
        )


def _plan_of(
    arrivals: list[Arrival],
    config: Config,
    clock: Clock,
    trace_block_size: int,
    spec_requests: int,
    *,
    as_json: bool,
) -> tuple[Work, Work]:
    """The work, and the small one."""
    try:
        work = recorded(
            f"{len(arrivals)} requests", arrivals, config, clock, trace_block_size=trace_block_size
        )
        few = list(islice(arrivals, spec_requests))
        small = recorded(
            f"{len(few)} requests", few, config, clock, trace_block_size=trace_block_size
        )
    except (TraceLineError, NeverEnds) as error:
        fail(str(error), as_json=as_json)
    return work, small


def _bench(
    works: tuple[Work, Work],
    trace: Path,
    *,
    release: str,
    dynamo: Path | None,
    repeats: int,
    with_growth: bool,
    as_json: bool,
) -> None:
    rows: list[Row] = []
    costs: list[Growth] = []
    trouble: str | None = None
    with progress(None, what="rows") as (say, advance):
        try:
            installed = None if release == "none" else set_up(release, progress=say)
            plan = Plan(
                work=works[0],
                small=works[1],
                vllm=installed,
                dynamo=dynamo,
                trace=trace,
                repeats=repeats,
            )
            for row in measure(plan, say):
                rows.append(row)
                advance(len(rows))
            if with_growth:
                say("how costs grow")
                costs.extend(growth())
        except (BenchError, SetupError) as error:
            trouble = str(error)
        except KeyboardInterrupt:
            trouble = "interrupted"
    faster = ratios(rows, works[0], works[1])
    if as_json:
        click.echo(json.dumps(_as_json(works, rows, costs, faster, trouble)))
    else:
        _print(rows, costs, faster)
    if trouble:
        fail(trouble)


def _as_json(
    works: tuple[Work, Work],
    rows: list[Row],
    costs: list[Growth],
    faster: dict[str, float | None],
    trouble: str | None,
) -> dict[str, Any]:
    return {
        "work": [
            {
                "name": work.name,
                "config": attrs.asdict(work.config),
                "requests": len(work.requests),
                "steps": work.num_steps,
            }
            for work in works
        ],
        "rows": [{**attrs.asdict(row), "per_step_us": row.per_step_us} for row in rows],
        "ratios": faster,
        "growth": [{**attrs.asdict(cost), "ratio": cost.ratio} for cost in costs],
        "reason": trouble,
    }


def _print(rows: list[Row], costs: list[Growth], faster: dict[str, float | None]) -> None:
    console = PlainConsole(emoji=False)
    table = Table(box=None)
    table.add_column("", no_wrap=True)
    for name in ("work", "seconds", "steps", "µs a step", "peak MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            row.work,
            f"{row.seconds:.4f}",
            "" if row.steps is None else f"{row.steps:,}",
            "" if row.per_step_us is None else f"{row.per_step_us:.2f}",
            f"{row.peak_mib:.0f}",
        )
    console.print(table)
    for name, ratio in faster.items():
        if ratio is not None:
            console.print(f"{name}: {ratio:.3g} times as fast")
    for cost in costs:
        console.print(f"{cost.what} ({cost.unit}):")
        sizes = ", ".join(f"{size:,}: {value:.2f}" for size, value in cost.costs.items())
        console.print(f"  {sizes}; largest to smallest {cost.ratio:.2f}")
