"""The smallest scenario that still shows what a larger one showed. Hypothesis does the shrinking.

A scenario is taken apart into choices: which requests and operations to keep, how many tokens, how
many blocks. Making the choices of the original gives the original; making smaller ones gives a
smaller scenario. The original's choices are put where Hypothesis looks for failures of an earlier
run, so that it starts from there, and its shrinker does the rest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase, choices_to_bytes
from hypothesis.errors import Flaky, NoSuchExample

from mustfit_spec import Config, ConfigError, NewRequest, Operation, Scenario, ScenarioError

#: Under which name the original's choices wait for Hypothesis.
KEY = b"mustfit"


class Chooser(Protocol):
    """Makes the choices that a scenario consists of."""

    def integer(self, low: int, original: int) -> int:
        """A whole number from ``low`` to the original one; the smaller, the simpler."""

    def keep(self) -> bool:
        """Whether to keep something; not to is simpler."""


class _Original:
    """Chooses as in the original, and notes the choices."""

    def __init__(self) -> None:
        self.choices: list[bool | int] = []

    def integer(self, low: int, original: int) -> int:
        if low < original:
            self.choices.append(original)
        return original

    def keep(self) -> bool:
        self.choices.append(True)
        return True


class _Drawn:
    """Lets Hypothesis choose."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw

    def integer(self, low: int, original: int) -> int:
        if low >= original:
            return original
        drawn: int = self.draw(st.integers(low, original))
        return drawn

    def keep(self) -> bool:
        kept: bool = self.draw(st.booleans())
        return kept


def shrink(
    scenario: Scenario,
    still_shows: Callable[[Scenario], bool],
    *,
    candidates: int = 5000,
    seconds: float = 600.0,
) -> Scenario:
    """The smallest scenario found that ``still_shows`` what this one shows.

    Args:
        scenario: The one to start from; ``still_shows`` has to hold for it.
        still_shows: The question to keep the answer to.
        candidates: How often to ask at most; so what comes out doesn't depend on the machine.
        seconds: After so long, the smallest found by then has to do, for a scheduler that hangs.
    """
    best = Smallest(scenario, still_shows, left=candidates, deadline=time.monotonic() + seconds)
    without_needless_requests(best)
    by_hypothesis(best)
    without_needless_requests(best)
    return renamed(best.scenario, still_shows)


def without_needless_requests(best: Smallest) -> None:
    """Leaves out each request that isn't needed, with all that is done to it."""
    for request in best.scenario.requests:
        name = request.request_id
        best.consider(
            attrs.evolve(
                best.scenario,
                requests=tuple(r for r in best.scenario.requests if r.request_id != name),
                operations=tuple(o for o in best.scenario.operations if o.request_id != name),
            )
        )


def by_hypothesis(best: Smallest) -> None:
    """Lets Hypothesis's shrinker take the scenario down."""
    scenario = best.scenario
    original = _Original()
    rebuild(scenario, original)
    database = InMemoryExampleDatabase()
    # One choice more than is needed: Hypothesis doesn't shrink what it takes to be shrunk already,
    # which is a failure that needed just the choices it was saved with.
    database.save(KEY, choices_to_bytes([*original.choices, True]))
    # Nothing smaller is no failure. Nor is Flaky: the time was up, and what had held no longer did.
    with contextlib.suppress(NoSuchExample, Flaky):
        hypothesis.find(
            _smaller(scenario),
            best.consider,
            settings=settings(
                database=database,
                phases=(Phase.reuse, Phase.shrink),
                max_examples=1,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
            database_key=KEY,
        )


class Smallest:
    """Remembers the smallest scenario that still showed it."""

    def __init__(
        self,
        scenario: Scenario,
        still_shows: Callable[[Scenario], bool],
        *,
        left: int,
        deadline: float,
    ) -> None:
        self.scenario = scenario
        self.still_shows = still_shows
        self.left = left
        self.deadline = deadline

    def consider(self, candidate: Scenario | None) -> bool:
        """Whether a candidate shows it; the smallest that does is remembered."""
        if candidate is None or self.left <= 0 or time.monotonic() > self.deadline:
            return False
        self.left -= 1
        shows = self.still_shows(candidate)
        if shows and size(candidate) <= size(self.scenario):
            self.scenario = candidate
        return shows


def size(scenario: Scenario) -> tuple[int, int, int]:
    """What makes a scenario small: few requests, few operations, few tokens."""
    tokens = sum(len(r.prompt_token_ids) + r.output_limit for r in scenario.requests)
    return len(scenario.requests), len(scenario.operations), tokens


@st.composite
def _smaller(draw: Callable[[st.SearchStrategy[Any]], Any], original: Scenario) -> Scenario | None:
    """Scenarios that are smaller than the original; ``None`` where the choices make no sense."""
    try:
        return rebuild(original, _Drawn(draw))
    except (ConfigError, ScenarioError, ValueError):
        return None


def rebuild(original: Scenario, choose: Chooser) -> Scenario:
    """The original, as far as the choices leave it.

    Choices about one thing stand together, so that Hypothesis can take the thing out.
    """
    config = _config(original.config, choose)
    requests = [_request(r, choose) for r in original.requests if choose.keep()]
    kept = {r.request_id for r in requests}
    operations: list[Operation] = []
    for operation, steps in _runs(original.operations):
        # A request that is kept is added; whatever else there is may go.
        if operation is not None and (operation.op == "add" or choose.keep()):
            operations += [operation] if operation.request_id in {*kept, None} else []
        if steps:
            operations += [Operation(op="step")] * choose.integer(0, steps)
    return Scenario(
        scenario_id=original.scenario_id,
        config=config,
        requests=tuple(requests),
        operations=tuple(operations),
    )


def _runs(operations: tuple[Operation, ...]) -> list[tuple[Operation | None, int]]:
    """The operations, each with the number of steps that follow it."""
    runs: list[tuple[Operation | None, int]] = [(None, 0)]
    for operation in operations:
        if operation.op == "step":
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((operation, 0))
    return runs


def _config(original: Config, choose: Chooser) -> Config:
    """Numbers get smaller; what is set to something unusual may go back to its default."""
    chosen: dict[str, Any] = {}
    for field in attrs.fields(Config):
        value = getattr(original, field.name)
        if field.default is attrs.NOTHING:
            chosen[field.name] = choose.integer(field.metadata["minimum"], value)
        elif value != field.default and choose.keep():
            whole = isinstance(value, int) and not isinstance(value, bool)
            low = max(field.metadata.get("minimum", 0), 1)
            chosen[field.name] = choose.integer(low, value) if whole else value
    return Config(**chosen)


def _request(original: NewRequest, choose: Chooser) -> NewRequest:
    prompt = choose.integer(1, len(original.prompt_token_ids))
    output = choose.integer(1, original.output_limit)
    optional: dict[str, Any] = {}
    if original.min_tokens and choose.keep():
        optional["min_tokens"] = choose.integer(1, original.min_tokens)
    for field in ("eos_token_id", "stop_token_ids", "priority", "arrival_time"):
        value = getattr(original, field)
        if value != getattr(attrs.fields(NewRequest), field).default and choose.keep():
            optional[field] = value
    return NewRequest(
        request_id=original.request_id,
        prompt_token_ids=original.prompt_token_ids[:prompt],
        sampled_token_ids=original.sampled_token_ids[:output],
        **optional,
    )


def renamed(scenario: Scenario, still_shows: Callable[[Scenario], bool]) -> Scenario:
    """The same with tokens counted from 0 in order of appearance, if it still shows it then."""
    names: dict[int, int] = {}

    def name(token: int) -> int:
        return names.setdefault(token, len(names))

    plain = attrs.evolve(
        scenario,
        requests=tuple(
            attrs.evolve(
                r,
                prompt_token_ids=tuple(name(t) for t in r.prompt_token_ids),
                sampled_token_ids=tuple(name(t) for t in r.sampled_token_ids),
                eos_token_id=None if r.eos_token_id is None else name(r.eos_token_id),
                stop_token_ids=tuple(name(t) for t in r.stop_token_ids),
            )
            for r in scenario.requests
        ),
    )
    return plain if still_shows(plain) else scenario
