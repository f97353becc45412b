"""A made-up trace, always the same, for those who have none: conversations that go on for a while.

Its numbers imitate no service in particular. A conversation's next prompt begins with all that was
said before, as far as whole blocks go, and all begin with the same block.
"""

from __future__ import annotations

import json
import random
from itertools import count
from pathlib import Path

#: Milliseconds between two arrivals, on average.
GAP_MS = 300.0
#: Tokens that a turn adds to a conversation, and that are answered, on average.
TURN = 4000.0
ANSWER = 300.0
#: How often somebody goes on with a conversation rather than beginning one.
GOES_ON = 0.4


def write_trace(file: Path, *, requests: int, block_size: int, seed: int = 0) -> None:
    """Writes a trace in Mooncake's format.

    Args:
        file: Where to.
        requests: How many.
        block_size: Tokens that a hash id stands for.
        seed: Another gives another trace.
    """
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    fresh = count(1)
    at = 0.0
    conversations: list[tuple[int, list[int]]] = []
    with file.open("w", encoding="ascii") as lines:
        for _ in range(requests):
            at += rng.expovariate(1 / GAP_MS)
            length, names = 0, [0]
            if conversations and rng.random() < GOES_ON:
                length, names = rng.choice(conversations)
            length += 1 + int(rng.expovariate(1 / TURN))
            names = names[: max(length // block_size, 1)]
            names += [next(fresh) for _ in range(-(-length // block_size) - len(names))]
            line = {
                "timestamp": int(at),
                "input_length": length,
                "output_length": 1 + int(rng.expovariate(1 / ANSWER)),
                "hash_ids": names,
            }
            lines.write(json.dumps(line) + "\n")
            conversations.append((length, names[: length // block_size]))
