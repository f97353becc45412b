"""The scopes that are explored: small, and each made for something.

Each is explored for every revision that has the fields which it sets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from mustfit_checks.moves import Scope
from mustfit_spec import Config, ConfigError, NewRequest, Scheduler

GATE_OFF: dict[str, Any] = {"scheduler_reserve_full_isl": False}


def kind(name: str, prompt: str, output: str, **given: Any) -> NewRequest:
    """A kind of request; tokens are digits."""
    return NewRequest(
        request_id=name,
        prompt_token_ids=tuple(map(int, prompt)),
        sampled_token_ids=tuple(map(int, output)),
        **given,
    )


#: Three kinds that hit each other's blocks and meet in their outputs, too.
SHORT, FORKING, LONG = kind("s", "000", "00"), kind("f", "01", "001"), kind("l", "0000", "10")
KINDS = (SHORT, FORKING, LONG)
#: One of lower priority.
LESS_URGENT = attrs.evolve(SHORT, priority=1)
#: As long as the model, and made to go on; and longer.
OVERLONG = kind("o", "000000", "000", min_tokens=2)
LONGER = kind("x", "0000000", "000", min_tokens=2)
STOPPING = kind("t", "01", "101", stop_token_ids=(0,), min_tokens=1)


def _scope(
    name: str, kinds: tuple[NewRequest, ...] = KINDS, *, max_requests: int = 3, **fields: Any
) -> Scope:
    """Three blocks of two tokens to hand out, which one sequence as long as the model takes up."""
    base: dict[str, Any] = {
        "num_gpu_blocks": 4,
        "block_size": 2,
        "max_model_len": 6,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 4,
    }
    return Scope(
        name=name, config=Config(**(base | fields)), kinds=kinds, max_requests=max_requests
    )


#: What is explored unless something else is asked for.
DEFAULT: tuple[Scope, ...] = (
    _scope("gate-on"),
    _scope("gate-off", **GATE_OFF),
    _scope("priority", (LESS_URGENT, FORKING), policy="priority"),
    _scope("priority-gate-off", (LESS_URGENT, FORKING), policy="priority", **GATE_OFF),
    _scope("lookahead", num_lookahead_tokens=1, **GATE_OFF),
    _scope("threshold", (SHORT, LONG), long_prefill_token_threshold=1, **GATE_OFF),
    _scope(
        "adaptive-threshold",
        (SHORT, LONG),
        long_prefill_token_threshold=1,
        long_prefill_token_threshold_adaptive=True,
        **GATE_OFF,
    ),
    _scope("no-prefix-caching", enable_prefix_caching=False),
    _scope(
        "no-chunked-prefill",
        enable_chunked_prefill=False,
        max_num_batched_tokens=6,
        max_num_scheduled_tokens=5,
        **GATE_OFF,
    ),
    _scope("watermark", watermark=0.3, **GATE_OFF),
    _scope("second-budget", max_requests=2, max_num_scheduled_tokens=3),
    _scope("second-seats", max_requests=2, max_num_active_seqs=1),
    _scope(
        "beyond-the-model",
        (OVERLONG, FORKING),
        max_requests=2,
        max_num_batched_tokens=8,
        policy="priority",
        **GATE_OFF,
    ),
    _scope(
        "beyond-the-model-in-chunks",
        (OVERLONG, FORKING),
        max_requests=2,
        policy="priority",
        **GATE_OFF,
    ),
    _scope("beyond-the-model-gate-on", (LONGER, FORKING), max_requests=2, max_num_batched_tokens=8),
    _scope("stop-tokens", (STOPPING, SHORT), max_requests=2),
    _scope("short-pool", num_gpu_blocks=3),
    _scope("short-pool-gate-off", num_gpu_blocks=3, **GATE_OFF),
    _scope(
        "short-pool-no-caching",
        (LONG, FORKING),
        num_gpu_blocks=3,
        enable_prefix_caching=False,
        **GATE_OFF,
    ),
)


def _large(scope: Scope) -> Scope:
    """The same with two blocks more, a longer model, and a third seat."""
    config = scope.config
    return attrs.evolve(
        scope,
        name=f"large-{scope.name}",
        config=attrs.evolve(
            config,
            num_gpu_blocks=config.num_gpu_blocks + 2,
            max_model_len=config.max_model_len + 2,
            max_num_seqs=3,
            max_num_batched_tokens=config.max_num_batched_tokens + 2,
        ),
        kinds=tuple(
            attrs.evolve(kind, prompt_token_ids=(kind.prompt_token_ids[0], *kind.prompt_token_ids))
            for kind in scope.kinds
        ),
        max_requests=4,
    )


#: What takes hours.
LARGE: tuple[Scope, ...] = tuple(_large(scope) for scope in DEFAULT)

SETS = {"default": DEFAULT, "large": LARGE}
SCOPES = {scope.name: scope for scope in (*DEFAULT, *LARGE)}


class UnknownScope(ValueError):
    """There is no such scope. Its text is one line that says which there are."""


def chosen(
    names: Iterable[str], scheduler: type[Scheduler]
) -> tuple[tuple[Scope, ...], tuple[str, ...]]:
    """The scopes that are called so; and those of a set that the revision doesn't have.

    Raises:
        UnknownScope: One doesn't exist, or not in this revision.
    """
    scopes: dict[str, Scope] = {}
    lacking: list[str] = []
    for name in names:
        if name not in SETS and name not in SCOPES:
            known = ", ".join((*SETS, *SCOPES))
            raise UnknownScope(f"there is no scope {name!r}; there are: {known}")
        for scope in SETS.get(name) or (SCOPES[name],):
            try:
                scheduler(scope.config)
            except ConfigError as error:
                if name not in SETS:
                    raise UnknownScope(f"scope {name!r}: {error}") from error
                lacking.append(scope.name)
            else:
                scopes[scope.name] = scope
    return tuple(scopes.values()), tuple(lacking)
