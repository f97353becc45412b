# ruff: noqa: SLF001 - what the implementation knows is part of its state
"""The other side, that is explored in lockstep with the specification.

A side is brought from state to state by operations, and back to states that were saved.
"""

from __future__ import annotations

import pickle
from typing import Any, Protocol

from mustfit_checks.moves import Scope, key_of
from mustfit_impl import Scheduler as Implementation
from mustfit_impl import StepOutcome as ImplementationOutcome
from mustfit_spec import (
    Config,
    NewRequest,
    Operation,
    Scheduler,
    SchedulerFailure,
    State,
    StepOutcome,
    StepTrace,
    initial_state,
)
from mustfit_spec.run import observe

#: What is observed between steps.
_NO_STEP = StepOutcome(num_scheduled_tokens=(), preempted=(), num_cached_tokens=())
_NO_STEP_OF_IMPLEMENTATION = ImplementationOutcome({}, (), {}, {})


class Side(Protocol):
    """A scheduler in some state.

    Attributes:
        name: What it is called.
    """

    name: str

    def saved(self) -> Any:
        """The state that it is in, to be kept, in memory and in files."""

    def restore(self, saved: Any) -> None:
        """It is in that state again."""

    def apply(self, operation: Operation, given: NewRequest | None) -> StepTrace | None:
        """Does it. All that can be observed then; ``None`` where vLLM's own assertions fail."""

    def remembered(self, scope: Scope) -> tuple[Any, ...]:
        """What decides what it does from here on, beyond what was observed, but for names."""


def applied(
    scheduler: Scheduler, state: State, operation: Operation, given: NewRequest | None
) -> tuple[State, StepOutcome]:
    """The specification's state after an operation, and what it did, if it is a step.

    Raises:
        SchedulerFailure: Where vLLM's own assertions fail.
    """
    if operation.op == "step":
        return scheduler.step(state)
    if given is not None:
        return scheduler.add_request(state, given), _NO_STEP
    if operation.op == "abort":
        return scheduler.abort(state, str(operation.request_id)), _NO_STEP
    return (
        scheduler.reset_prefix_cache(
            state, reset_running_requests=operation.reset_running_requests
        ),
        _NO_STEP,
    )


class SpecificationSide:
    """The specification of a revision, or a wrong one."""

    name = "the other specification"

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.state = initial_state(scheduler.config)

    def saved(self) -> State:
        """The state, which nobody changes."""
        return self.state

    def restore(self, saved: State) -> None:
        """It is in that state again."""
        self.state = saved

    def apply(self, operation: Operation, given: NewRequest | None) -> StepTrace | None:
        """Does it."""
        try:
            self.state, outcome = applied(self.scheduler, self.state, operation, given)
        except SchedulerFailure:
            return None
        return observe(self.state, outcome)

    def remembered(self, scope: Scope) -> tuple[Any, ...]:
        """Its state."""
        return key_of(scope, self.state)


class ImplementationSide:
    """The implementation.

    Args:
        config: The configuration.
        revision: The first vLLM release of the revision.
    """

    name = "implementation"

    #: The implementation's class, or one that is wrong.
    implementation: type[Implementation] = Implementation

    def __init__(self, config: Config, revision: str) -> None:
        self.scheduler = self.implementation(
            config=config, revision=revision, refuse_overlong=False
        )

    def saved(self) -> bytes:
        """All that it is made of."""
        return pickle.dumps(self.scheduler)

    def restore(self, saved: bytes) -> None:
        """It is in that state again."""
        self.scheduler = pickle.loads(saved)  # noqa: S301 - our own

    def apply(self, operation: Operation, given: NewRequest | None) -> StepTrace | None:
        """Does it."""
        outcome = self._outcome(operation, given)
        return None if outcome is None else self.scheduler.observe(outcome)

    def _outcome(
        self, operation: Operation, given: NewRequest | None
    ) -> ImplementationOutcome | None:
        scheduler = self.scheduler
        if operation.op == "step":
            try:
                return scheduler.step()
            except SchedulerFailure:
                return None
        if given is not None:
            scheduler.add_request(given)
        elif operation.op == "abort":
            scheduler.abort(str(operation.request_id))
        else:
            scheduler.reset_prefix_cache(reset_running_requests=operation.reset_running_requests)
        return _NO_STEP_OF_IMPLEMENTATION

    def remembered(self, _: Scope) -> tuple[Any, ...]:
        """What it knows without being told: of those who decode, and of who was refused.

        Steps until each who runs does something else than decode, whether the head's refusal is
        still known, and what is left of a stride.
        """
        scheduler = self.scheduler
        decoders, pool = scheduler._decoders, scheduler._pool
        due = {
            request.request_id: at - decoders.clock
            for at, _, entry, request in decoders._events
            if request.entry == entry
        }
        refused = scheduler._refused
        known = (
            refused is not None
            and refused.request_id == scheduler.head()
            and scheduler._refused_cache == pool.cache.changes
            and scheduler._refused_releases == pool.releases
        )
        return (
            tuple(due.get(request_id) for request_id in scheduler.running),
            (known, scheduler._refused_limits if known else None),
            # Without anybody who runs, a stride has no end: it is a number that no run uses up.
            min(scheduler._stride, _FOR_EVER),
        )


#: More steps than there are between two events of any scope.
_FOR_EVER = 1 << 32
