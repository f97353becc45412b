"""Traces in Mooncake's format: a request a line, known by its lengths and hashes.

``{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}``

The timestamp is in milliseconds, lengths are in tokens. A hash id names the content of a block of
512 tokens, given all blocks before it; the last may cover fewer. Further fields are left alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import attrs
import msgspec

#: Tokens that a hash id of Mooncake's own traces stands for.
TRACE_BLOCK_SIZE = 512

_POSITIVE = msgspec.Meta(ge=1)
_PATH = re.compile(r" - at `\$\.?(?P<field>[^`]*)`$")


class TraceLineError(ValueError):
    """A line that is no request. Its text is one line that says where and what."""


class Line(msgspec.Struct, frozen=True):
    """What a line says."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, _POSITIVE]
    output_length: Annotated[int, _POSITIVE]
    hash_ids: tuple[int, ...]


@attrs.frozen
class Arrival:
    """A request of a trace.

    Attributes:
        number: Its line, counted from 1; its id is ``r`` and that number.
        at: When it arrives, in microseconds.
        num_prompt_tokens: Its prompt, in tokens.
        max_tokens: Its output, in tokens.
        hash_ids: Names of its prompt's blocks, of the trace's block size.
        trace: The file.
    """

    number: int
    at: int
    num_prompt_tokens: int
    max_tokens: int
    hash_ids: tuple[int, ...]
    trace: str = attrs.field(default="trace", eq=False)

    @property
    def where(self) -> str:
        """The line, to be found again."""
        return f"{self.trace}:{self.number}"

    @property
    def request_id(self) -> str:
        """Its name."""
        return f"r{self.number}"


def read(
    trace: Path,
    *,
    trace_block_size: int = TRACE_BLOCK_SIZE,
    limit: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Iterator[Arrival]:
    """The requests of a trace, one by one; nothing is kept.

    Args:
        trace: The file; ``-`` for stdin.
        trace_block_size: Tokens that a hash id stands for.
        limit: How many requests at most.
        advance: Is told now and then how many bytes were read.

    Raises:
        TraceLineError: A line is no request. Those before have been given.
        OSError: The file can't be read.
    """
    decode = msgspec.json.Decoder(Line).decode
    name = "stdin" if str(trace) == "-" else str(trace)
    opened = nullcontext(sys.stdin.buffer) if name == "stdin" else trace.open("rb")
    last = 0.0
    read_bytes = given = 0
    with opened as lines:
        for number, raw in enumerate(lines, start=1):
            if limit is not None and given >= limit:
                return
            read_bytes += len(raw)
            if not raw.strip():
                continue
            try:
                line = decode(raw)
                wrong = _wrong(line, last, trace_block_size)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                wrong = _said(error)
            if wrong:
                raise TraceLineError(f"{name}:{number}: {wrong}")
            last = line.timestamp
            given += 1
            advance(read_bytes)
            yield Arrival(
                number,
                round(line.timestamp * 1000),
                line.input_length,
                line.output_length,
                line.hash_ids,
                name,
            )


def _wrong(line: Line, last: float, trace_block_size: int) -> str | None:
    """What is wrong with a line that its types don't say, the field first."""
    if line.timestamp < last:
        return f"timestamp: {line.timestamp:g} comes after {last:g}"
    wanted = -(-line.input_length // trace_block_size)
    if len(line.hash_ids) != wanted:
        return (
            f"hash_ids: {len(line.hash_ids)} for the {wanted} blocks of {trace_block_size} tokens "
            f"of input_length {line.input_length}"
        )
    return None


def _said(error: Exception) -> str:
    """What the decoder says is wrong, the field first."""
    message = str(error)
    path = _PATH.search(message)
    return f"{path['field']}: {_PATH.sub('', message)}" if path else message


def names_of_blocks(
    hash_ids: tuple[int, ...], num_tokens: int, trace_block_size: int, block_size: int
) -> tuple[Hashable, ...]:
    """A name for each full block of the scheduler's, from names for blocks of another size.

    Two of the scheduler's blocks are equal if and only if all names that they overlap are, all
    blocks before being equal.
    """
    num_full = num_tokens // block_size
    if trace_block_size == block_size:
        return hash_ids[:num_full]
    if trace_block_size % block_size == 0:
        each = trace_block_size // block_size
        return tuple(hash_ids[index // each] for index in range(num_full))
    return tuple(
        hash_ids[
            index * block_size // trace_block_size : -(
                -(index + 1) * block_size // trace_block_size
            )
        ]
        for index in range(num_full)
    )
