"""Stateful machines: the implementation beside the specification, after every single operation.

    pytest tests/test_stateful.py                                   a minute, the same every time
    pytest tests/test_stateful.py --machines ci                     longer, with a fresh seed
    pytest tests/test_stateful.py --machines soak --soak-seconds 1800 -k 0.33.0
    pytest tests/test_stateful.py --machines soak --machines-seed SEED -k 0.33.0    repeats a round

``quick`` has a fixed seed, so that it goes red for a change and not for the day it is run on; what
nobody has seen yet is looked for by the other two. No profile keeps an example database: a run is
made again from what it prints, and from nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from random import Random
from typing import Any, Protocol

import attrs
import pytest
from hypothesis import Phase, reproduce_failure, seed, settings
from hypothesis import __version__ as hypothesis_version
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mustfit_impl import Run, Scheduler, StepOutcome
from mustfit_impl.block_pool import BlockPool
from mustfit_impl.prefix_cache import Branch, Hit, PrefixCache
from mustfit_impl.queues import PriorityQueue
from mustfit_impl.request import Request, request_of
from mustfit_spec import (
    REVISIONS,
    Config,
    NewRequest,
    SchedulerFailure,
    State,
    StepTrace,
    fields_of,
)
from mustfit_spec import Request as SpecRequest
from mustfit_spec import Scheduler as Spec
from mustfit_spec import StepOutcome as SpecOutcome
from mustfit_spec.kv_cache_manager import cdiv
from mustfit_spec.run import observe
from mustfit_spec.scheduler import Step
from mustfit_spec.state import NULL_BLOCK, initial_state

#: Shared beginnings, and outputs that run into somebody else's prompt.
PATTERNS = ((0,) * 64, (0, 1) * 32, (1,) * 64, (0, 0, 1, 2) * 16)
#: Few, so that names are used again once their request has ended.
NAMES = tuple("efghabcdklij")
MOST_LIVE = 8

#: What is the same in all steps of a stride, wherever their blocks are.
STRIDE_FIELDS = (*fields_of("decisions"), "num_cached_tokens", "finish_reasons")

NOTHING = StepOutcome({}, (), {}, {})
SPEC_NOTHING = SpecOutcome(num_scheduled_tokens=(), preempted=(), num_cached_tokens=())

Factory = Callable[..., Scheduler]


class Machines(Protocol):
    """What was asked for on the command line (``conftest.py``)."""

    profile: str
    command: str
    seed: int
    seconds: float
    blob: str | None


# --- What is drawn ----------------------------------------------------------------------------


#: What a configuration is made for. What has to come together for a rule seldom does by chance:
#: several run, and there are fewer tokens than that; or somebody gets none any more, its sequence
#: being at the model's end, until another takes its blocks.
AIMS = (
    *("anything",) * 6,
    "too few tokens",
    *("beyond the model",) * 2,
)


@st.composite
def fields_of_configs(draw: st.DrawFn, aim: str) -> dict[str, Any]:
    """Every field there is; pools in which one long sequence fits, or just doesn't."""

    def one_in(number: int) -> bool:
        return draw(st.integers(1, number)) == number

    block_size = draw(st.integers(1, 4))
    model_blocks = draw(st.integers(3, 7))
    max_model_len = max(2, model_blocks * block_size + draw(st.integers(-1, 1)))
    num_gpu_blocks = 1 + model_blocks + draw(st.integers(-1, 4))
    max_num_seqs = 6 - draw(st.integers(1, 5 if aim == "anything" else 3))
    chunked = not one_in(4)
    budget = max_num_seqs + draw(st.integers(0, 3 * block_size))
    budget = max(
        budget + 2 * max_model_len * one_in(3),
        0 if chunked else max_model_len,
    )
    fields: dict[str, Any] = {
        "num_gpu_blocks": num_gpu_blocks,
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": not one_in(5),
        "policy": draw(st.sampled_from(("fcfs", "priority"))),
        "scheduler_reserve_full_isl": draw(st.booleans()),
    }
    if one_in(5):
        fields["max_num_scheduled_tokens"] = draw(st.integers(1, budget + 2))
    if one_in(6):
        fields["max_num_active_seqs"] = draw(st.integers(1, max_num_seqs))
    if one_in(3):
        fields["long_prefill_token_threshold"] = draw(
            st.integers(1, min(max_model_len, 2 * block_size + 1))
        )
        fields["long_prefill_token_threshold_adaptive"] = draw(st.booleans())
    if one_in(3):
        # A whole number of blocks, by a hair or amply.
        blocks = draw(st.integers(1, 3)) + draw(st.sampled_from((0.5, 0.0)))
        fields["watermark"] = min(0.9, blocks / num_gpu_blocks)
    if one_in(4):
        fields["num_lookahead_tokens"] = draw(st.integers(1, 2 * block_size))
    if aim == "too few tokens":
        fields["max_num_scheduled_tokens"] = max(1, max_num_seqs - draw(st.integers(-2, 2)))
    if aim != "anything":
        fields |= {"policy": "priority", "scheduler_reserve_full_isl": False}
        fields["num_gpu_blocks"] = 1 + model_blocks + draw(st.integers(-1, 1))
    return fields


@st.composite
def setups(draw: st.DrawFn, lacks: frozenset[str]) -> tuple[Config, bool]:
    """A configuration of a revision's fields, and whether there may be prompts beyond the model."""
    aim = draw(st.sampled_from(AIMS))
    fields = draw(fields_of_configs(aim))
    overlong = aim == "beyond the model" or draw(st.integers(1, 5)) == 5
    return Config(**{name: fields[name] for name in fields.keys() - lacks}), overlong


@st.composite
def ends_of_requests(draw: st.DrawFn, num_sampled: int, *, past_the_end: bool) -> dict[str, Any]:
    """What may end a request before its sampled tokens do."""

    def one_in(number: int) -> bool:
        return draw(st.integers(1, number)) == number

    ends: dict[str, Any] = {}
    if past_the_end:
        ends["min_tokens"] = num_sampled
    else:
        if one_in(5):
            ends["max_tokens"] = draw(st.integers(1, num_sampled))
        if one_in(6):
            ends["min_tokens"] = draw(st.integers(1, ends.get("max_tokens", num_sampled)))
    if one_in(6):
        ends["eos_token_id"] = draw(st.integers(0, 2))
    if one_in(8):
        ends["stop_token_ids"] = (draw(st.integers(0, 2)),)
    return ends


@st.composite
def new_requests(
    draw: st.DrawFn,
    names: tuple[str, ...],
    config: Config,
    others: tuple[tuple[int, ...], ...],
    *,
    overlong: bool,
) -> NewRequest:
    """A request by one of these names; its tokens are such that blocks are often shared."""

    def one_in(number: int) -> bool:
        return draw(st.integers(1, number)) == number

    longest = config.max_model_len - 1
    if not one_in(4):
        # Short ones are admitted together, and then grow into each other's way.
        longest = min(longest, 2 * config.block_size + 1)
    length = draw(st.integers(1, longest))
    if overlong and one_in(3):
        length = config.max_model_len + draw(st.integers(0, config.block_size))
    # So many tokens as another request may have, too, and then others.
    shared = draw(st.integers(0, length))
    first, second, sampled = (draw(st.sampled_from(PATTERNS)) for _ in range(3))
    prompt = first[:shared] + second[: length - shared]
    if others and one_in(3):
        # What somebody is going to have: its prefix hit grows while it waits.
        prompt = draw(st.sampled_from(others))[: config.max_model_len - 1]
    num_sampled = 1 + draw(st.integers(0, 5 * config.block_size))
    # Some go on where the model ends, and are given nothing to compute.
    past_the_end = overlong and one_in(3)
    if past_the_end:
        num_sampled += config.max_model_len
    ends = draw(ends_of_requests(num_sampled, past_the_end=past_the_end))
    if config.policy == "priority":
        ends["priority"] = draw(st.integers(0, 2))
        ends["arrival_time"] = draw(st.integers(0, 1))
    return NewRequest(
        request_id=draw(st.sampled_from(names)),
        prompt_token_ids=prompt,
        sampled_token_ids=sampled[:num_sampled],
        **ends,
    )


# --- What is looked at ------------------------------------------------------------------------


Path = tuple[Hashable, ...]


def tuple_of(content: Hashable) -> tuple[object, ...]:
    assert isinstance(content, tuple)
    return content


def tree_of(cache: PrefixCache) -> dict[Path, tuple[int, ...]]:
    """Every content in the prefix tree, from the sequence's start, and the blocks cached with it.

    The blocks are in the order in which lookups find them.
    """
    found: dict[Path, tuple[int, ...]] = {}
    root, _ = cache.root
    left: list[tuple[Branch, Path]] = [(root, ())]
    while left:
        branch, before = left.pop()
        for place, block_id in enumerate(branch.block_ids):
            path = (*before, *branch.contents[: place + 1])
            assert path not in found, "one content in two places"
            later = tuple(branch.later.get(place, ()))
            found[path] = (block_id, *later) if block_id else ()
            assert block_id or not later
        for place, forks in branch.forks.items():
            for content, fork in forks.items():
                assert (fork.parent, fork.fork, fork.contents[0]) == (branch, place, content)
                left.append((fork, (*before, *branch.contents[: place + 1])))
    return found


def numbers(scheduler: Scheduler, request: Request) -> tuple[int, int]:
    """Tokens computed and tokens known, which aren't kept up to date for decoders."""
    if request.entry:
        computed = scheduler._decoders.clock - request.started_at
        return computed, computed + 1
    return request.num_computed_tokens, request.num_tokens


def internals(scheduler: Scheduler) -> tuple[object, ...]:
    """All that decides what the scheduler does next."""
    pool, cache = scheduler._pool, scheduler._pool.cache
    requests = [
        (
            request.request_id,
            numbers(scheduler, request),
            tuple(request.block_ids),
            request.num_cached_blocks,
            request.tail,
            request.running,
        )
        for request in scheduler._requests.values()
    ]
    return (
        requests,
        scheduler.running,
        scheduler.waiting,
        tuple(pool.ref_cnt),
        tuple(pool.free),
        (tuple(cache.branch_of), tuple(cache.place_of)),
        tree_of(cache),
    )


def watched(implementation: Factory, counts: Counter[str]) -> Factory:
    """The same scheduler; each attempt at an admission is looked at from both sides."""

    class Watched(implementation):  # type: ignore[misc, valid-type]
        def _admit(self, request: Request, *args: int) -> int:
            before = internals(self)
            pool = self._pool
            running, references = self.running, list(pool.ref_cnt)
            known, free = request.num_tokens, len(pool.free)
            chunk: int = super()._admit(request, *args)
            if not chunk:
                counts["refusals"] += 1
                assert internals(self) == before, "a refused admission left something behind"
                return chunk
            counts["admissions"] += 1
            assert self.running == (*running, request.request_id)
            num_hit = request.num_computed_tokens // self.config.block_size
            hit = request.block_ids[:num_hit]
            inactive = sum(references[block_id] == 0 for block_id in hit)
            counts["admissions that hit"] += bool(hit)
            counts["admissions that hit inactive blocks"] += bool(inactive)
            taken = free - len(pool.free)
            new = len(request.block_ids) - num_hit
            assert taken == new + inactive, "an inactive hit is taken out of the free blocks"
            reserved = int(self.config.watermark * self.config.num_gpu_blocks) if running else 0
            assert taken + reserved <= free, "an admission leaves the watermark alone"
            if self.config.scheduler_reserve_full_isl:
                whole = cdiv(min(known, self.config.max_model_len), self.config.block_size)
                needed = max(whole, num_hit) - num_hit + inactive
                assert needed + reserved <= free, "all that is known of it fits"
            return chunk

    return Watched


def watched_spec(spec: type[Spec]) -> type[Spec]:
    """The same specification; the arithmetic of an admission is looked at from both sides."""

    class WatchedSpec(spec):  # type: ignore[misc, valid-type]
        def try_to_admit(self, step: Step, request: SpecRequest) -> Step | None:
            admitted: Step | None = super().try_to_admit(step, request)
            if admitted is None:
                return None
            before, after = step.state, admitted.state.request(request.request_id)
            hit = self.get_computed_blocks(before, request)
            assert after.block_ids[: len(hit)] == hit
            inactive = sum(block_id in before.free_block_queue for block_id in hit)
            taken = before.num_free_blocks - admitted.state.num_free_blocks
            assert taken == len(after.block_ids) - len(hit) + inactive
            assert step.state.running == admitted.state.running[:-1]
            assert not step.preempted, "admission in a step that preempted"
            return admitted

        def blocked(self, step: Step, head: SpecRequest) -> Step:
            assert super().blocked(step, head) == step
            return step

    return WatchedSpec


def check_blocks(scheduler: Scheduler) -> None:
    """Each block is held, or free, or null; and reference counts count tables."""
    pool = scheduler._pool
    tables = [request.block_ids for request in scheduler._requests.values()]
    assert all(len(set(table)) == len(table) for table in tables)
    held = Counter(block_id for table in tables for block_id in table)
    everybody = [NULL_BLOCK, *pool.free, *held]
    assert sorted(everybody) == list(range(scheduler.config.num_gpu_blocks))
    assert pool.ref_cnt == [held[block_id] for block_id in range(len(pool.ref_cnt))]


def check_tree(cache: PrefixCache) -> dict[Path, tuple[int, ...]]:
    """The prefix tree, which holds what the cached blocks need, and nothing else."""
    needed: set[Path] = set()
    cached: list[int] = []
    found = tree_of(cache)
    for path, block_ids in found.items():
        cached += block_ids
        for block_id in block_ids:
            branch = cache.branch_of[block_id]
            assert branch is not None
            assert branch.contents[cache.place_of[block_id]] == path[-1]
            needed |= {path[:end] for end in range(1, len(path) + 1)}
    assert {*found} == needed, "a content that no cached block has or begins with"
    assert sorted(cached) == [b for b, branch in enumerate(cache.branch_of) if branch is not None]
    return found


def check_contents(scheduler: Scheduler, state: State) -> None:
    """Each block is cached with the tokens that the specification says it holds."""
    for path, block_ids in check_tree(scheduler._pool.cache).items():
        tokens: tuple[object, ...] = sum(map(tuple_of, path), start=())
        assert all(state.blocks[block_id].block_hash == tokens for block_id in block_ids)


def check_refusal(scheduler: Scheduler, spec: Spec, state: State) -> None:
    """Whoever needn't be tried again would be refused again, with whatever budget."""
    request = scheduler._refused
    if request is None or scheduler._requests.get(request.request_id) is not request:
        return
    if request.running:
        return
    pool, cache = scheduler._pool, scheduler._pool.cache
    if (scheduler._refused_cache, scheduler._refused_releases) == (cache.changes, pool.releases):
        # It has waited since, and nothing has changed its hit: it is the one that was found then.
        hit = spec.get_computed_blocks(state, state.request(request.request_id))
        assert cache._watched_hit == frozenset(hit)
    most = spec.token_budget()
    for budget in {1, 2, (most + 1) // 2, max(most - len(state.running), 1), most}:
        if scheduler._is_known_to_be_refused(request, budget):
            step = Step(
                state=state,
                token_budget=budget,
                long_prefill_token_threshold=spec.long_prefill_token_threshold(state),
            )
            assert spec.try_to_admit(step, state.request(request.request_id)) is None


def check_requests(scheduler: Scheduler, state: State) -> None:
    """Each request is where the specification has it, with the same numbers."""
    assert {*scheduler._requests} == {request.request_id for request in state.requests}
    for given in state.requests:
        request = scheduler._requests[given.request_id]
        assert request.running == (given.request_id in state.running)
        assert numbers(scheduler, request) == (given.num_computed_tokens, given.num_tokens)
        assert tuple(request.block_ids) == given.block_ids
        assert request.running or not (given.block_ids or request.tail)
        # The specification's number goes on, as vLLM's does, where there are no more blocks.
        cached = min(given.num_cached_blocks, len(given.block_ids))
        assert request.num_cached_blocks == cached
    decoders = [request for request in scheduler._running if request.entry]
    assert len(decoders) == scheduler._decoders.size
    others = [request for request in scheduler._running if not request.entry]
    assert {*others} == {*scheduler._others}
    assert len(others) == len(scheduler._others)


def check_step(spec: Spec, before: State, after: State, outcome: StepOutcome) -> None:
    """What holds of any step, by what the implementation says of it."""
    config = spec.config
    scheduled, preempted = outcome.num_scheduled_tokens, outcome.preempted
    admitted = tuple(outcome.num_cached_tokens)

    # Nobody running is preempted by an admission.
    assert not (preempted and admitted), "admission in a step that preempted"
    assert {*preempted} <= {*before.running}
    assert not {*preempted} & {*scheduled}

    # Budgets of tokens and of seats.
    assert all(chunk > 0 for chunk in scheduled.values())
    assert sum(scheduled.values()) <= spec.token_budget()
    threshold = spec.long_prefill_token_threshold(before)
    assert not threshold or all(chunk <= threshold for chunk in scheduled.values())
    ran = [r for r in (*before.running, *admitted) if r not in preempted]
    assert len(ran) <= config.max_num_seqs
    lacks_seats = "max_num_active_seqs" in spec.lacks
    seats = config.max_num_seqs if lacks_seats else config.max_num_active_seqs
    assert not admitted or len(ran) <= (seats or config.max_num_seqs)

    # Order: of admission in running, of arrival or of priority in waiting.
    assert after.running == tuple(r for r in ran if r not in outcome.finished)
    assert list(scheduled) == [r for r in ran if r in scheduled]
    assert list(outcome.finished) == [r for r in scheduled if r in outcome.finished]
    assert before.waiting[: len(admitted)] == admitted
    left = before.waiting[len(admitted) :]
    if config.policy == "fcfs":
        assert after.waiting == (*reversed(preempted), *left)
    else:
        everybody = [after.request(r) for r in (*preempted, *left)]
        ordered = sorted(everybody, key=spec.priority_key)
        assert after.waiting == tuple(request.request_id for request in ordered)


# --- The machine ------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """What can be done to the specification and to two implementations.

    One implementation steps, the other takes strides.
    """

    spec_class: type[Spec]
    revision: str
    make: Factory
    counts: Counter[str]

    config: Config
    overlong = False
    failed = False
    recomputed = 0

    def begin(self, config: Config, *, overlong: bool) -> None:
        self.config = config
        self.overlong = overlong
        self.spec = self.spec_class(config)
        self.state = initial_state(config)
        # For each live request, most tokens that were computed when it was preempted.
        self.reached: Counter[str] = Counter()
        self.impl, self.strided = (
            type(self).make(config=config, revision=self.revision, refuse_overlong=False)
            for _ in range(2)
        )
        self.counts["examples"] += 1

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(request.request_id for request in self.state.requests)

    @property
    def fresh(self) -> tuple[str, ...]:
        return tuple(name for name in NAMES if name not in self.live)

    def a_request(self) -> st.SearchStrategy[NewRequest]:
        others = tuple(
            request.given.prompt_token_ids + request.given.sampled_token_ids
            for request in self.state.requests
        )
        return new_requests(self.fresh, self.config, others, overlong=self.overlong)

    def several_requests(self) -> st.SearchStrategy[list[NewRequest]]:
        return st.lists(self.a_request(), min_size=2, max_size=5, unique_by=lambda r: r.request_id)

    def agreed(self) -> None:
        """What can be seen between steps is the same."""
        expected = observe(self.state, SPEC_NOTHING)
        assert self.impl.observe(NOTHING) == expected
        assert self.strided.observe(NOTHING) == expected

    # Not bound to a failed scheduler, which is of no use any more.

    @precondition(lambda self: not self.failed and len(self.live) < MOST_LIVE)
    @rule(request=st.runner().flatmap(lambda self: self.a_request()))
    def add(self, request: NewRequest) -> None:
        self.state = self.spec.add_request(self.state, request)
        self.impl.add_request(request)
        self.strided.add_request(request)
        self.counts["requests"] += 1
        self.agreed()

    @precondition(lambda self: not self.failed and len(self.live) < MOST_LIVE // 2)
    @rule(requests=st.runner().flatmap(lambda self: self.several_requests()))
    def add_several(self, requests: list[NewRequest]) -> None:
        for request in requests:
            self.add(request)

    @precondition(lambda self: not self.failed)
    @rule()
    def step(self) -> None:
        self.take(1, stride=1)

    @precondition(lambda self: not self.failed and self.live)
    @rule(count=st.integers(2, 6), stride=st.integers(1, 6), same_blocks=st.booleans())
    def several_steps(self, count: int, stride: int, *, same_blocks: bool) -> None:
        self.take(count, stride=stride, same_blocks=same_blocks)

    @precondition(lambda self: not self.failed and self.live)
    @rule(count=st.integers(7, 25), same_blocks=st.booleans())
    def many_steps(self, count: int, *, same_blocks: bool) -> None:
        self.take(count, stride=count, same_blocks=same_blocks)

    @precondition(lambda self: not self.failed)
    @rule(name=st.runner().flatmap(lambda self: st.sampled_from((*self.live, *self.fresh[:1]))))
    def abort(self, name: str) -> None:
        there = self.state.has(name)
        self.state = self.spec.abort(self.state, name)
        del self.reached[name]
        assert self.impl.abort(name) == there
        assert self.strided.abort(name) == there
        self.counts["aborts"] += there
        self.agreed()

    @precondition(lambda self: not self.failed and self.state.cached_block_ids)
    @rule(reset_running_requests=st.booleans())
    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        if reset_running_requests:
            self.note_preemptions(self.state, self.state.running)
        self.state = self.spec.reset_prefix_cache(
            self.state, reset_running_requests=reset_running_requests
        )
        empty = all(block.ref_cnt == 0 for block in self.state.blocks)
        for scheduler in (self.impl, self.strided):
            done = scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)
            assert done == empty
        self.counts["resets"] += empty
        self.agreed()

    @precondition(lambda self: self.failed)
    @rule()
    def over(self) -> None:
        pass

    def take(self, count: int, *, stride: int, same_blocks: bool = True) -> None:
        """So many steps, one by one, and then the same in strides of at most so many."""
        traces: list[StepTrace] = []
        while len(traces) < count and not self.failed:
            trace = self.take_one()
            if trace is not None:
                traces.append(trace)
        taken = 0
        while taken < len(traces):
            most = min(stride, count - taken)
            run = self.strided.advance(most, same_blocks=same_blocks)
            assert 1 <= run.steps <= most
            trace = self.strided.observe(run.outcome)
            of_which = traces[taken : taken + run.steps]
            assert len(of_which) == run.steps, "a stride past a failure"
            assert trace == of_which[-1]
            for name in STRIDE_FIELDS if not same_blocks else fields_of("identity"):
                for expected in of_which:
                    assert getattr(trace, name) == getattr(expected, name)
            taken += run.steps
            self.counts["strides of several steps"] += run.steps > 1
            self.counts["strides over several states"] += of_which[0] != of_which[-1]
        if self.failed:
            with pytest.raises(SchedulerFailure):
                self.strided.advance(stride)

    def take_one(self) -> StepTrace | None:
        """One step, by specification and implementation; ``None`` if both failed."""
        before, inside = self.state, internals(self.impl)
        try:
            self.state, expected = self.spec.step(before)
        except SchedulerFailure:
            self.failed = True
            with pytest.raises(SchedulerFailure):
                self.impl.step()
            self.counts["failures"] += 1
            return None
        outcome = self.impl.step()
        trace = self.impl.observe(outcome)
        assert trace == observe(self.state, expected)
        check_step(self.spec, before, self.state, outcome)
        if not outcome.num_scheduled_tokens and not outcome.preempted:
            assert self.state == before
            assert internals(self.impl) == inside, "a step without anything in it left a trace"
            self.counts["idle steps with somebody waiting"] += bool(before.waiting)
        self.note_preemptions(before, outcome.preempted)
        for name, chunk in outcome.num_scheduled_tokens.items():
            start = outcome.num_cached_tokens.get(name, before.request(name).num_computed_tokens)
            again = max(min(start + chunk, self.reached[name]) - start, 0)
            self.recomputed += again
            self.counts["tokens computed again"] += again
        for name in outcome.finished:
            del self.reached[name]
        self.counts["steps"] += 1
        self.counts["preemptions"] += len(outcome.preempted)
        self.counts["ends"] += len(outcome.finished)
        return trace

    def note_preemptions(self, before: State, preempted: Iterable[str]) -> None:
        for name in preempted:
            computed = before.request(name).num_computed_tokens
            self.reached[name] = max(self.reached[name], computed)

    @invariant()
    @precondition(lambda self: not self.failed)
    def nothing_is_lost(self) -> None:
        for scheduler in (self.impl, self.strided):
            check_blocks(scheduler)
            check_contents(scheduler, self.state)
            check_requests(scheduler, self.state)
            check_refusal(scheduler, self.spec, self.state)
            assert scheduler.num_recomputed_tokens == self.recomputed


def machine_of(revision: str, implementation: Factory = Scheduler) -> type[Machine]:
    """The machine for a revision, with any implementation."""
    spec = REVISIONS[revision]
    tally: Counter[str] = Counter()

    class OfRevision(Machine):
        @initialize(setup=setups(spec.lacks))
        def configure(self, setup: tuple[Config, bool]) -> None:
            config, overlong = setup
            self.begin(config, overlong=overlong)

    OfRevision.spec_class = watched_spec(spec)
    OfRevision.revision = revision
    OfRevision.make = staticmethod(watched(implementation, tally))
    OfRevision.counts = tally
    return OfRevision


def run_machine(machine: type[Machine], profile: str, *, from_seed: int, **changes: Any) -> None:
    run_state_machine_as_test(
        seed(from_seed)(machine), settings=settings(settings.get_profile(profile), **changes)
    )


#: What has to have happened in a run that says anything. A failure of vLLM's own takes a prompt
#: beyond ``max_model_len``, and a revision that still fails there.
HAPPENED = (
    "steps",
    "requests",
    "ends",
    "aborts",
    "resets",
    "preemptions",
    "admissions",
    "admissions that hit",
    "admissions that hit inactive blocks",
    "refusals",
    "tokens computed again",
    "idle steps with somebody waiting",
    "strides of several steps",
    "strides over several states",
)


@pytest.mark.parametrize("revision", REVISIONS)
def test_the_implementation_does_what_the_specification_does(
    revision: str, machines: Machines, record_property: Callable[[str, object], None]
) -> None:
    machine = machine_of(revision)
    if machines.blob is not None:
        reproduce_failure(hypothesis_version, machines.blob.encode())(machine)
    started, round_seed, rounds = time.monotonic(), machines.seed, 0
    try:
        while not rounds or time.monotonic() - started < machines.seconds:
            round_seed = machines.seed + rounds
            rounds += 1
            run_machine(machine, machines.profile, from_seed=round_seed)
    except BaseException as error:
        error.add_note(
            f"The whole round again: pytest {__file__} -k {revision} {machines.command} "
            f"{round_seed}\nOr the example alone: --machines-blob with what Hypothesis gives as "
            "@reproduce_failure"
        )
        raise
    finally:
        counts = ", ".join(f"{number} {what}" for what, number in sorted(machine.counts.items()))
        record_property(
            "machine",
            f"{revision}: {time.monotonic() - started:.0f} s, {rounds} rounds, "
            f"seeds {machines.seed} to {round_seed}: {counts}",
        )
    assert all(machine.counts[what] for what in HAPPENED)
    if "STEP-ASSERT" not in REVISIONS[revision].moot:
        assert machine.counts["failures"]


def test_a_run_is_made_again_from_its_seed() -> None:
    first, again, other = (machine_of("0.33.0") for _ in range(3))
    for machine, from_seed in ((first, 7), (again, 7), (other, 8)):
        run_machine(machine, "machines-quick", from_seed=from_seed, max_examples=20)
    assert first.counts == again.counts != other.counts


# --- Parts by themselves ----------------------------------------------------------------------


class CacheBeside:
    """The prefix cache beside a list of what is cached, under operations at random.

    So few contents that sequences part and meet, blocks of equal content pile up, and those in the
    middle go before the others.
    """

    def __init__(self, number: int) -> None:
        self.random = Random(number)
        self.num_blocks = self.random.randint(3, 14)
        self.cache = PrefixCache(self.num_blocks + 1)
        self.cached: dict[int, Path] = {}
        self.watch()

    def path(self, most: int) -> Path:
        return tuple(self.random.choices("aab", k=self.random.randint(0, most)))

    def hit(self, path: Path) -> list[int]:
        """The blocks of a prefix, looked up the long way."""
        hit: list[int] = []
        for end in range(1, len(path) + 1):
            block_ids = [b for b, content in self.cached.items() if content == path[:end]]
            if not block_ids:
                break
            hit.append(block_ids[0])
        return hit

    def watch(self) -> None:
        self.watched = self.path(6)
        hit = self.cache.find(self.watched)
        self.cache.watch(hit)
        self.watched_hit = hit[0]
        self.changes = self.cache.changes

    def enter(self) -> None:
        free = [b for b in range(1, self.num_blocks + 1) if b not in self.cached]
        sought, after = self.path(3), (*self.path(3), self.random.choice("ab"))
        block_ids = self.random.sample(free, k=len(free))[: len(after)]
        if not block_ids:
            return
        after = after[: len(block_ids)]
        hit, position, _ = self.cache.find(sought)
        before = sought[: len(hit)]
        position = self.cache.enter(position, list(after), block_ids)
        assert position == self.cache.find(before + after)[1]
        for end, block_id in enumerate(block_ids, start=1):
            self.cached[block_id] = before + after[:end]

    def forget(self) -> None:
        everybody = list(range(1, self.num_blocks + 1))
        block_ids = self.random.sample(everybody, k=self.random.randint(1, 4) % len(everybody))
        self.cache.forget(block_ids)
        for block_id in block_ids:
            self.cached.pop(block_id, None)

    def clear(self) -> None:
        self.cache.clear(self.num_blocks + 1)
        self.cached.clear()
        self.watch()

    def check(self) -> None:
        blocks: dict[Path, tuple[int, ...]] = {}
        for block_id, path in self.cached.items():
            blocks[path] = (*blocks.get(path, ()), block_id)
        assert {path: b for path, b in check_tree(self.cache).items() if b} == blocks
        sought = self.path(6)
        assert self.cache.find(sought)[0] == self.hit(sought)
        # What is watched has changed if and only if that was counted.
        changed = self.hit(self.watched) != self.watched_hit
        assert changed == (self.cache.changes != self.changes)


@pytest.mark.parametrize("number", range(60))
def test_the_prefix_cache_by_itself(number: int) -> None:
    beside = CacheBeside(number)
    for _ in range(80):
        kinds = (beside.enter, beside.forget, beside.watch, beside.clear)
        beside.random.choices(kinds, weights=(10, 10, 5, 0.4))[0]()
        beside.check()
        if beside.cache.changes != beside.changes:
            beside.watch()


@pytest.mark.parametrize("number", range(20))
def test_the_priority_queue_by_itself(number: int) -> None:
    random = Random(number)
    queue, waiting = PriorityQueue(), list[Request]()
    for _ in range(200):
        names = {request.request_id for request in waiting}
        if random.random() < (0.7 if len(waiting) < 4 else 0.4) and len(names) < len(NAMES):
            given = NewRequest(
                request_id=random.choice([name for name in NAMES if name not in names]),
                prompt_token_ids=(0,),
                sampled_token_ids=(0,),
                priority=random.randint(0, 2),
                arrival_time=random.randint(0, 1),
            )
            request = request_of(given, block_size=1, max_model_len=2, min_tokens_counts=True)
            waiting.append(request)
            (queue.add if random.random() < 0.5 else queue.requeue)(request)
        elif waiting:
            # Mostly the head, as in admissions; or somebody else, as in aborts.
            request = random.choice(waiting) if random.random() < 0.4 else queue.head()
            waiting.remove(request)
            queue.remove(request)
        waiting.sort(key=lambda request: request.priority_key)
        assert list(queue) == waiting
        assert len(queue) == len(waiting)
        assert not waiting or queue.head() is waiting[0]
        assert len(queue._heap) <= 2 * len(waiting) + 1


# --- What the machine is worth ----------------------------------------------------------------


class ForgetsEviction(BlockPool):
    __slots__ = ()

    def take(self, count: int) -> list[int]:
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self.ref_cnt[block_id] = 1
        return taken


class WatchesNothing(PrefixCache):
    """Whoever is refused isn't tried again when the prefix hit has changed."""

    __slots__ = ()

    def watch(self, hit: Hit) -> None:
        pass


class Forgetful(Scheduler):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._pool.__class__ = ForgetsEviction


class Unwatched(Scheduler):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._pool.cache.__class__ = WatchesNothing


class SkipsWatermark(Scheduler):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._watermark_blocks = 0


class LeavesTheGateOpen(Scheduler):
    def __init__(self, *, config: Config, **given: Any) -> None:
        super().__init__(config=attrs.evolve(config, scheduler_reserve_full_isl=False), **given)


class CountsInactiveHitsAsHeld(Scheduler):
    """Compares only new blocks with the free ones, where somebody is running (dynamo 9721)."""

    def _lookup(self, request: Request) -> Hit:
        hit = super()._lookup(request)
        inactive = sum(not self._pool.ref_cnt[block_id] for block_id in hit[0])
        kept = int(self.config.watermark * self.config.num_gpu_blocks)
        self._watermark_blocks = kept - inactive
        return hit


class PreemptsForAdmission(Scheduler):
    """Makes room for the head (dynamo 9718)."""

    def _admit(self, request: Request, budget: int, threshold: int) -> int:
        chunk = super()._admit(request, budget, threshold)
        if not chunk and len(self._running) > 1:
            self._look_at_everybody()
            self._preempt(self._victim())
        return chunk


class KeepsPartOfARefusedAllocation(Scheduler):
    """As in dynamo 11016."""

    def _admit(self, request: Request, budget: int, threshold: int) -> int:
        chunk = super()._admit(request, budget, threshold)
        if not chunk and self._pool.free:
            self._pool.take(1)
        return chunk


class KeepsARefusalTooLong(Scheduler):
    def _is_known_to_be_refused(self, request: Request, *_: int) -> bool:
        return self._refused is request


class PicksAnotherVictim(Scheduler):
    def _victim(self) -> int:
        return max(0, super()._victim() - 1)


class FreesInOrder(Scheduler):
    def _free(self, request: Request) -> None:
        request.block_ids.reverse()
        super()._free(request)


class StridesOneTooFar(Scheduler):
    def advance(self, max_steps: int, **given: bool) -> Run:
        outcome, steps = super().advance(max_steps, **given)
        if steps < max_steps:
            super().advance(1)
            steps += 1
        return Run(outcome, steps)


FAULTS: dict[str, Factory] = {
    "forgets eviction": Forgetful,
    "watches nothing": Unwatched,
    "skips the watermark": SkipsWatermark,
    "leaves the gate open": LeavesTheGateOpen,
    "counts inactive hits as held": CountsInactiveHitsAsHeld,
    "preempts for an admission": PreemptsForAdmission,
    "keeps part of a refused allocation": KeepsPartOfARefusedAllocation,
    "keeps a refusal too long": KeepsARefusalTooLong,
    "picks another victim": PicksAnotherVictim,
    "frees in order": FreesInOrder,
    "strides one too far": StridesOneTooFar,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_within_the_quick_budget(fault: str) -> None:
    machine = machine_of("0.33.0", FAULTS[fault])
    with pytest.raises((AssertionError, KeyError)):
        run_machine(
            machine,
            "machines-quick",
            from_seed=0,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            print_blob=False,
        )
