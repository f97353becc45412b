"""The command ``mustfit bench``."""

from __future__ import annotations

from pathlib import Path

import click

from mustfit_checks.console import as_json


@click.command()
@click.argument("trace", required=False, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--limit", type=click.IntRange(1), help="The first requests of the trace only.")
@click.option(
    "--spec-requests",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="So many of them for the comparison with the specification, which is slow.",
)
@click.option("--num-gpu-blocks", type=click.IntRange(2), default=300, show_default=True)
@click.option("--block-size", type=click.IntRange(1), default=512, show_default=True)
@click.option("--max-model-len", type=click.IntRange(2), default=131_072, show_default=True)
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@click.option("--max-num-batched-tokens", type=click.IntRange(1), default=8192, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--vllm",
    "release",
    metavar="RELEASE",
    help="The real scheduler to compare with, or `none`. [default: the newest measured]",
)
@click.option(
    "--dynamo-python",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="A Python that has ai-dynamo-runtime. [default: this one, if it has]",
)
@as_json
def bench(
    *,
    trace: Path | None,
    limit: int | None,
    spec_requests: int,
    num_gpu_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    repeats: int,
    release: str | None,
    dynamo_python: Path | None,
    as_json: bool,
) -> None:
    """Time the specification, the implementation and the real vLLM on the same work."""
