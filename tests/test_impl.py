"""The implementation's public face: what it refuses, what it promises, and what its steps cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from random import Random
from types import FrameType
from typing import Any

import attrs
import pytest

from mustfit_checks.generate import scenarios
from mustfit_impl import (
    REVISIONS,
    Config,
    ConfigError,
    HashedRequest,
    NewRequest,
    RequestError,
    Scheduler,
    SchedulerFailure,
    StepOutcome,
    run,
    run_in_strides,
)
from mustfit_impl.prefix_cache import Branch, Hit, PrefixCache
from mustfit_impl.request import Request
from mustfit_spec import REVISIONS as SPECS
from mustfit_spec import ScenarioError, StepTrace
from mustfit_spec import run as run_spec

revisions = pytest.mark.parametrize("revision", REVISIONS)
policies = pytest.mark.parametrize("policy", ["fcfs", "priority"])

NOTHING = StepOutcome({}, (), {}, {})
CONFIG = Config(
    num_gpu_blocks=9, block_size=2, max_model_len=32, max_num_seqs=3, max_num_batched_tokens=16
)
#: Room for anything.
LARGE = Config(
    num_gpu_blocks=50_000,
    block_size=4,
    max_model_len=100_000,
    max_num_seqs=8,
    max_num_batched_tokens=100_000,
)


def new_request(request_id: str, *, prompt: int = 3, outputs: int = 12, **given: Any) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(prompt)),
        sampled_token_ids=tuple(range(100, 100 + outputs)),
        **given,
    )


def hashed(request_id: str, blocks: int, *, max_tokens: int = 1000, **given: Any) -> HashedRequest:
    """Whole blocks of ``LARGE`` that no other request has, and one token."""
    return HashedRequest(
        request_id=request_id,
        num_prompt_tokens=blocks * LARGE.block_size + 1,
        hash_ids=tuple((request_id, block) for block in range(blocks)),
        max_tokens=max_tokens,
        **given,
    )


# --- What is refused --------------------------------------------------------------------------

BAD: dict[str, tuple[NewRequest | HashedRequest, str]] = {
    "the prompt is as long as the model": (new_request("x", prompt=32), "max_model_len"),
    "the prompt is longer": (new_request("x", prompt=50), "max_model_len"),
    "the id is that of somebody who runs": (new_request("runs"), "'runs' is there already"),
    "the id is that of somebody who waits": (new_request("waits"), "'waits' is there already"),
    "a block has no name": (
        HashedRequest(request_id="x", num_prompt_tokens=7, hash_ids=(1, 2), max_tokens=1),
        "2 hash_ids for the 3 full blocks",
    ),
    "a name can't be hashed": (
        HashedRequest(request_id="x", num_prompt_tokens=2, hash_ids=([],), max_tokens=1),  # type: ignore[arg-type]
        "hash_ids have to be hashable",
    ),
}


def under_way(*, steps: int) -> Scheduler:
    scheduler = Scheduler(config=CONFIG)
    scheduler.add_request(new_request("runs", outputs=20))
    scheduler.add_request(new_request("waits", prompt=16, outputs=4))
    scheduler.step()
    if steps:
        scheduler.advance(steps)
    return scheduler


@pytest.mark.parametrize("steps", range(4), ids=lambda steps: f"after {steps} steps")
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_request_is_refused_and_changes_nothing(bad: str, steps: int) -> None:
    request, message = BAD[bad]
    disturbed, other = under_way(steps=steps), under_way(steps=steps)
    assert (disturbed.running, disturbed.waiting) == (("runs",), ("waits",))
    before = disturbed.observe(NOTHING)
    with pytest.raises(RequestError, match=message):
        disturbed.add_request(request)
    assert disturbed.observe(NOTHING) == before == other.observe(NOTHING)
    while other.num_running:
        assert disturbed.advance(100) == other.advance(100)
        assert disturbed.observe(NOTHING) == other.observe(NOTHING)


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    scheduler = Scheduler(config=CONFIG)
    for _ in range(2):
        scheduler.add_request(new_request("a", outputs=1))
        assert scheduler.step().finished == {"a": "length"}
    scheduler.add_request(new_request("a"))
    scheduler.step()
    assert scheduler.abort("a")
    scheduler.add_request(new_request("a"))
    assert scheduler.waiting == ("a",)
    assert scheduler.step().num_cached_tokens == {"a": 2}


def test_a_prompt_as_long_as_the_model_is_taken_if_asked_for() -> None:
    scheduler = Scheduler(config=CONFIG, refuse_overlong=False)
    scheduler.add_request(new_request("x", prompt=32))
    assert scheduler.head() == "x"


def test_tokens_and_names_may_be_given_as_lists() -> None:
    def trace(kind: type[list[int] | tuple[int, ...]]) -> list[StepOutcome]:
        scheduler = Scheduler(config=CONFIG)
        for request_id in "ab":
            scheduler.add_request(
                NewRequest(
                    request_id=request_id,
                    prompt_token_ids=kind(range(5)),  # type: ignore[arg-type]
                    sampled_token_ids=kind((7, 8)),  # type: ignore[arg-type]
                    stop_token_ids=kind((9,)),
                )
            )
            scheduler.add_request(
                HashedRequest(
                    request_id=f"hashed {request_id}",
                    num_prompt_tokens=5,
                    hash_ids=kind((1, 2)),
                    max_tokens=2,
                )
            )
        return [scheduler.step() for _ in range(3)]

    assert trace(list) == trace(tuple)
    assert trace(list)[0].num_cached_tokens["b"] == 4


def test_an_empty_prompt_is_no_request() -> None:
    with pytest.raises(ScenarioError, match="prompt_token_ids"):
        NewRequest(request_id="x", prompt_token_ids=(), sampled_token_ids=(1,))
    with pytest.raises(ValueError, match="num_prompt_tokens"):
        HashedRequest(request_id="x", num_prompt_tokens=0, max_tokens=1)


def test_an_unknown_revision_is_refused_by_name() -> None:
    with pytest.raises(KeyError, match=r"0\.20\.0.*0\.33\.0"):
        Scheduler(config=CONFIG, revision="0.20.0")


@revisions
def test_a_field_that_a_revision_lacks_is_refused_by_name(revision: str) -> None:
    other: dict[str, Any] = {
        "watermark": 0.1,
        "max_num_active_seqs": 1,
        "long_prefill_token_threshold_adaptive": True,
    }
    assert REVISIONS[revision].lacks == SPECS[revision].lacks
    for name, value in other.items():
        config = attrs.evolve(CONFIG, **{name: value})
        if name in REVISIONS[revision].lacks:
            with pytest.raises(ConfigError, match=name):
                Scheduler(config=config, revision=revision)
        else:
            Scheduler(config=config, revision=revision)


@pytest.mark.parametrize("max_steps", [0, -1])
def test_a_stride_has_a_step(max_steps: int) -> None:
    scheduler = under_way(steps=0)
    before = scheduler.observe(NOTHING)
    with pytest.raises(ValueError, match="max_steps"):
        scheduler.advance(max_steps)
    assert scheduler.observe(NOTHING) == before


# --- What is promised -------------------------------------------------------------------------


@revisions
def test_scenarios_run_as_on_the_specification_and_in_strides(revision: str) -> None:
    longest = 0
    for drawn in scenarios(seed=11, count=300, lacks=SPECS[revision].lacks):
        expected = run_spec(drawn, SPECS[revision](drawn.config))
        strides = run_in_strides(drawn, revision=revision)
        for answer in (run(drawn, revision=revision), strides.expand()):
            assert answer.steps == expected.steps, drawn
            assert (answer.error is None) == (expected.error is None), drawn
            if answer.error is not None and expected.error is not None:
                assert answer.error.step == expected.error.step, drawn
        for _, steps in strides.runs:
            longest = max(longest, steps)
    assert longest > 1


class Twins:
    """One run of requests of which only names of blocks are known, and one with their tokens."""

    def __init__(self, random: Random, revision: str) -> None:
        block_size = random.randint(1, 3)
        max_model_len = 12 * block_size
        lacks = REVISIONS[revision].lacks
        fields: dict[str, Any] = {
            "num_gpu_blocks": 14 + random.randint(0, 6),
            "block_size": block_size,
            "max_model_len": max_model_len,
            "max_num_seqs": 4,
            "max_num_batched_tokens": max_model_len,
            "policy": random.choice(("fcfs", "priority")),
            "scheduler_reserve_full_isl": random.random() < 0.7,
            "watermark": random.choice((0.0, 0.1)),
        }
        self.random = random
        self.config = Config(**{k: v for k, v in fields.items() if k not in lacks})
        self.named, self.spelt = (
            Scheduler(config=self.config, revision=revision, refuse_overlong=False)
            for _ in range(2)
        )
        self.tokens = 0
        self.known: dict[tuple[Hashable, ...], tuple[int, ...]] = {}

    def fresh(self, count: int) -> tuple[int, ...]:
        self.tokens += count
        return tuple(range(self.tokens - count, self.tokens))

    def add(self, request_id: str) -> None:
        random, block_size = self.random, self.config.block_size
        names: tuple[Hashable, ...] = tuple(
            random.choice((0, 0, 0, 1)) for _ in range(random.randint(0, 6))
        )
        prompt: tuple[int, ...] = ()
        for end in range(1, len(names) + 1):
            # A name means what it means behind the names before it.
            if names[:end] not in self.known:
                self.known[names[:end]] = self.fresh(block_size)
            prompt += self.known[names[:end]]
        prompt += self.fresh(random.randint(0 if prompt else 1, max(block_size - 1, not prompt)))
        if block_size == 1:
            own = range(len(names), len(prompt))
            names = (*names, *((request_id, place) for place in own))
        max_tokens = random.randint(1, 5 * block_size)
        order: dict[str, Any] = {
            "priority": random.randint(0, 2),
            "arrival_time": random.randint(0, 2),
        }
        self.named.add_request(
            HashedRequest(
                request_id=request_id,
                num_prompt_tokens=len(prompt),
                hash_ids=names,
                max_tokens=max_tokens,
                **order,
            )
        )
        self.spelt.add_request(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampled_token_ids=self.fresh(max_tokens),
                **order,
            )
        )

    def step(self) -> StepTrace:
        trace = self.named.observe(self.named.step())
        assert trace == self.spelt.observe(self.spelt.step())
        return trace


@revisions
def test_names_of_blocks_stand_for_their_tokens(revision: str) -> None:
    preempted = hit = 0
    for number in range(60):
        twins = Twins(Random(f"{revision}/{number}"), revision)
        for request in range(12):
            # Ids of requests that have ended come again, and don't mean the same output.
            request_id = f"r{request % 8}"
            if request_id in (*twins.named.running, *twins.named.waiting):
                continue
            twins.add(request_id)
            for _ in range(twins.random.randint(0, 5)):
                trace = twins.step()
                preempted += len(trace.preempted)
                hit += sum((trace.num_cached_tokens or {}).values()) > 0
            if twins.random.random() < 0.1:
                assert twins.named.abort(request_id) == twins.spelt.abort(request_id)
    assert preempted
    assert hit


# --- What a step costs ------------------------------------------------------------------------


class Looks(Scheduler):
    """Notes for whom the prefix cache is looked up, and how often it is searched at all."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.looked_up: list[str] = []
        self.searches = 0
        looks = self

        class Searched(PrefixCache):
            __slots__ = ()

            def find(self, contents: Any) -> Hit:
                looks.searches += 1
                return super().find(contents)

        self._pool.cache.__class__ = Searched

    def _lookup(self, request: Request) -> Hit:
        assert not request.running
        assert self.head() == request.request_id
        self.looked_up.append(request.request_id)
        return super()._lookup(request)


@revisions
def test_a_prefix_is_looked_up_for_the_head_only_and_once_a_step(revision: str) -> None:
    looked_up = 0
    for drawn in scenarios(seed=12, count=200, lacks=SPECS[revision].lacks):
        scheduler = Looks(config=drawn.config, revision=revision, refuse_overlong=False)
        for operation in drawn.operations:
            name = str(operation.request_id)
            if operation.op == "add":
                scheduler.add_request(drawn.request(name))
            elif operation.op == "abort":
                scheduler.abort(name)
            elif operation.op == "reset_prefix_cache":
                scheduler.reset_prefix_cache(
                    reset_running_requests=operation.reset_running_requests
                )
            else:
                scheduler.looked_up.clear()
                try:
                    outcome = scheduler.step()
                except SchedulerFailure:
                    break
                admitted = list(outcome.num_cached_tokens)
                refused = scheduler.looked_up[len(admitted) :]
                assert scheduler.looked_up[: len(admitted)] == admitted
                assert refused in ([], [scheduler.head()])
                looked_up += len(scheduler.looked_up)
                assert len(scheduler.looked_up) == scheduler.searches
                scheduler.searches = 0
            assert not scheduler.searches
    assert looked_up


@policies
@pytest.mark.parametrize("gate", [True, False])
def test_a_blocked_head_is_not_looked_up_again_while_nothing_was_released(
    policy: Any, *, gate: bool
) -> None:
    config = attrs.evolve(
        CONFIG, num_gpu_blocks=10, block_size=8, policy=policy, scheduler_reserve_full_isl=gate
    )
    scheduler = Looks(config=attrs.evolve(config, max_model_len=80, max_num_batched_tokens=80))
    for name in ("a", "b"):
        scheduler.add_request(new_request(name, prompt=25, outputs=7 if name == "b" else 30))
    scheduler.step()
    scheduler.add_request(new_request("c", prompt=60, outputs=7))
    scheduler.step()
    assert scheduler.waiting == ("c",)
    scheduler.looked_up.clear()
    for _ in range(4):
        scheduler.step()
    assert not scheduler.looked_up
    # Another behind it changes nothing for it either.
    scheduler.add_request(new_request("d", priority=1))
    while "b" in scheduler.running:
        assert not scheduler.looked_up
        scheduler.step()
    scheduler.step()
    assert scheduler.looked_up[:1] == ["c"]


def work(call: Callable[[], object]) -> int:
    """Bytecode instructions that a call takes in the implementation: the same on any machine."""
    done = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal done
        if "mustfit_impl" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        done += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return done


def decoding(*, blocks: int, waiting: int = 0, running: int = 1, **fields: Any) -> Scheduler:
    """So many who decode, with so much context, before a head that is blocked, and its followers.

    The first has taken a block just now.
    """
    needed = running * (blocks + 6)
    config = attrs.evolve(LARGE, num_gpu_blocks=1 + needed, max_num_seqs=running + 1, **fields)
    scheduler = Scheduler(
        config=attrs.evolve(
            config, max_num_batched_tokens=(needed + 1) * 4, max_model_len=(needed + 1) * 4
        )
    )
    for number in range(running):
        scheduler.add_request(hashed(f"r{number}", blocks))
    scheduler.step()
    for number in range(waiting):
        scheduler.add_request(hashed(f"w{number}", needed - 1))
    for _ in range(4):
        scheduler.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (running, waiting)
    return scheduler


def costs(scheduler: Scheduler) -> list[int]:
    """What steps cost in which blocks are filled and taken, and those between."""
    return [work(scheduler.step) for _ in range(3 * LARGE.block_size)]


def test_a_decode_step_costs_the_same_whatever_the_context() -> None:
    short, long = costs(decoding(blocks=10)), costs(decoding(blocks=5000))
    assert short == long
    assert min(short) > 0
    assert max(short) > min(short), "no block was taken"


@policies
def test_a_decode_step_costs_the_same_whoever_waits(policy: str) -> None:
    few = costs(decoding(blocks=10, waiting=10, policy=policy))
    many = costs(decoding(blocks=10, waiting=10_000, policy=policy))
    assert few == many


def test_steps_between_blocks_cost_the_same_however_many_decode() -> None:
    few = costs(decoding(blocks=10, running=2))
    many = costs(decoding(blocks=10, running=200))
    assert min(few) == min(many)


# --- What is kept -----------------------------------------------------------------------------


def size_of(cache: PrefixCache) -> int:
    """Contents in the prefix tree."""
    size = 0
    left: list[Branch] = [cache.root[0]]
    while left:
        branch = left.pop()
        size += len(branch.contents)
        left += [fork for forks in branch.forks.values() for fork in forks.values()]
    return size


@pytest.mark.parametrize("shared", [0, 3])
def test_the_prefix_tree_forgets_what_no_block_holds(shared: int) -> None:
    config = attrs.evolve(LARGE, num_gpu_blocks=41, max_model_len=160, max_num_batched_tokens=160)
    scheduler = Scheduler(config=config)
    blocks = 10
    for number in range(200):
        stem = tuple(("stem", number // 50, place) for place in range(shared))
        own = tuple((number, place) for place in range(blocks - shared))
        scheduler.add_request(
            HashedRequest(
                request_id=f"r{number}",
                num_prompt_tokens=4 * blocks,
                hash_ids=stem + own,
                max_tokens=6,
            )
        )
        while scheduler.num_running or scheduler.num_waiting:
            scheduler.step()
        cached = sum(map(len, scheduler.observe(NOTHING).cached_block_ids or ()))
        # Contents without a block of their own stand before one that is cached.
        assert cached <= size_of(scheduler._pool.cache) <= cached + shared * 4
    assert scheduler.num_free_blocks == 40
    assert not scheduler._requests
    # Somebody who takes the whole pool leaves nothing of the others.
    scheduler.add_request(hashed("last", 39, max_tokens=1))
    scheduler.step()
    assert scheduler.num_free_blocks == 40
    assert size_of(scheduler._pool.cache) == 39
    assert scheduler.reset_prefix_cache()
    assert size_of(scheduler._pool.cache) == 0


def test_who_left_is_forgotten_though_its_next_block_was_far_off() -> None:
    config = attrs.evolve(LARGE, block_size=10_000, num_gpu_blocks=10)
    scheduler = Scheduler(config=config)
    for number in range(1000):
        scheduler.add_request(new_request(f"r{number}", outputs=5000))
        scheduler.step()
        assert scheduler.abort(f"r{number}")
    assert scheduler.num_free_blocks == 9
    assert len(scheduler._decoders._events) < 100
