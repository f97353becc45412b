"""Traces: what a scheduler did with a scenario. One trace is one JSON object a line."""

from __future__ import annotations

from typing import Literal

import attrs

from mustfit_spec.config import at_least

Profile = Literal["decisions", "accounting", "identity"]
FinishReason = Literal["stop", "length"]

#: What each profile compares, weakest first; a profile compares its own fields and all before it.
PROFILE_FIELDS: dict[Profile, tuple[str, ...]] = {
    "decisions": ("num_scheduled_tokens", "preempted", "finished", "running", "waiting"),
    "accounting": ("num_free_blocks", "num_cached_tokens", "num_blocks", "finish_reasons"),
    "identity": ("block_ids", "free_block_ids", "cached_block_ids"),
}


def fields_of(profile: Profile) -> tuple[str, ...]:
    """All the fields that a profile compares, in the order of comparison."""
    names: list[str] = []
    for name, fields in PROFILE_FIELDS.items():
        names.extend(fields)
        if name == profile:
            break
    return tuple(names)


@attrs.frozen(kw_only=True)
class StepTrace:
    """One step: first what was scheduled, then the state once the step's output is in.

    The first five fields are always given; the others as far as the scheduler can tell, all of a
    profile's or none. ``preempted`` and ``finished`` are sets: their order says nothing.

    Attributes:
        num_scheduled_tokens: Tokens scheduled, for each request that got any.
        preempted: Requests that this step's scheduling preempted. Those that a reset of the prefix
            cache preempted before are not among them.
        finished: Requests that ended with this step's output. Aborted ones are not among them.
        running: Ids in ``running``, in order, once finished requests have left.
        waiting: Ids in ``waiting``, the one that is served next first.
        num_free_blocks: Blocks in the free queue, inactive cached ones among them.
        num_cached_tokens: For each request that this step admitted, tokens found in the prefix
            cache.
        num_blocks: Blocks held, for each request in ``running``.
        finish_reasons: Why each request in ``finished`` ended.
        block_ids: Blocks held, in order of position, for each request in ``running``.
        free_block_ids: The free queue, next to be handed out first: the eviction order.
        cached_block_ids: Blocks in the prefix cache. Blocks of equal content form a list, the one
            that a lookup finds first. The lists are a set: their order says nothing.
    """

    num_scheduled_tokens: dict[str, int]
    preempted: tuple[str, ...]
    finished: tuple[str, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    num_free_blocks: int | None = None
    num_cached_tokens: dict[str, int] | None = None
    num_blocks: dict[str, int] | None = None
    finish_reasons: dict[str, FinishReason] | None = None
    block_ids: dict[str, tuple[int, ...]] | None = None
    free_block_ids: tuple[int, ...] | None = None
    cached_block_ids: tuple[tuple[int, ...], ...] | None = None

    def has(self, profile: Profile) -> bool:
        """Whether every field that the profile compares is given."""
        return all(getattr(self, name) is not None for name in fields_of(profile))


@attrs.frozen(kw_only=True)
class TraceError:
    """The scheduler itself failed: an assertion of its own, an exception.

    Attributes:
        step: The step it failed in, counted from 0. The trace has that many entries.
        kind: What failed, such as ``AssertionError``. Not compared, but for two: ``Unsupported``
            says that the scheduler doesn't have what the scenario asks for, and ends the judging;
            ``InvariantViolation`` says that it contradicts itself, and agrees with nothing.
        message: In words. Not compared.
    """

    step: int = at_least(0)
    kind: str = ""
    message: str = ""


@attrs.frozen(kw_only=True)
class Trace:
    """What a scheduler did with one scenario.

    Attributes:
        scenario_id: The scenario that this answers.
        steps: An entry for each ``step`` of the scenario, up to the one that failed, if one did.
        error: The step in which the scheduler itself failed, if it did.
        release: The vLLM release that the scheduler claims to follow, if it claims one.
    """

    scenario_id: str
    steps: tuple[StepTrace, ...]
    error: TraceError | None = None
    release: str | None = None
