"""What the scheduler promises: of any state, and of any step.

Each promise is a function that says what is wrong, or nothing. They look at plain states of the
specification, reachable or not, and know nothing of how it gets from one to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from mustfit_spec import RequestStatus, Scheduler, State, StepOutcome
from mustfit_spec.state import NULL_BLOCK

#: What is wrong with a state, if anything is.
StatePromise = Callable[[Scheduler, State], Iterator[str]]

#: What is wrong with a step from one state to the next, if anything is.
StepPromise = Callable[[Scheduler, State, StepOutcome, State], Iterator[str]]


def broken_by_state(scheduler: Scheduler, state: State) -> list[str]:
    """Promises that a state breaks: their names, and what is wrong."""
    return [
        f"{name}: {wrong}"
        for name, promise in STATE_PROMISES.items()
        for wrong in promise(scheduler, state)
    ]


def broken_by_step(
    scheduler: Scheduler, before: State, outcome: StepOutcome, after: State
) -> list[str]:
    """Promises that a step breaks: their names, and what is wrong."""
    return [
        f"{name}: {wrong}"
        for name, promise in STEP_PROMISES.items()
        for wrong in promise(scheduler, before, outcome, after)
    ]


# --- Of a state -------------------------------------------------------------------------------


def blocks_are_in_one_place(_: Scheduler, state: State) -> Iterator[str]:
    """A block is null, free, or in tables; never two of these, and never none."""
    held = {block_id for request in state.requests for block_id in request.block_ids}
    free = Counter(state.free_block_queue)
    for block in state.blocks:
        places = (block.block_id == NULL_BLOCK) + free[block.block_id] + (block.block_id in held)
        if places != 1:
            yield f"block {block.block_id} is in {places} places"


def references_are_counted(_: Scheduler, state: State) -> Iterator[str]:
    """A block's reference count is the number of tables that hold it, and none holds it twice."""
    holders = Counter(block_id for request in state.requests for block_id in request.block_ids)
    for block in state.blocks:
        if block.ref_cnt != holders[block.block_id]:
            held = holders[block.block_id]
            yield f"block {block.block_id} has {block.ref_cnt} references and is held {held} times"
    for request in state.requests:
        if len({*request.block_ids}) < len(request.block_ids):
            yield f"{request.request_id} holds a block twice"


def cache_is_consistent(_: Scheduler, state: State) -> Iterator[str]:
    """A block is listed in the cache, once, if and only if it has a content."""
    listed = Counter(state.cached_block_ids)
    for block in state.blocks:
        if listed[block.block_id] != (block.block_hash is not None):
            yield f"block {block.block_id} is listed {listed[block.block_id]} times"


def queues_are_a_partition(_: Scheduler, state: State) -> Iterator[str]:
    """Everybody is in one queue, once, and in the one that their status says."""
    queued = Counter((*state.running, *state.waiting))
    for request in state.requests:
        running = request.status is RequestStatus.RUNNING
        if queued[request.request_id] != 1 or (request.request_id in state.running) != running:
            yield f"{request.request_id} is {request.status.value}, and in the wrong queue"
    if len(queued) != len(state.requests):
        yield "somebody is queued who isn't there"


def who_waits_holds_nothing(_: Scheduler, state: State) -> Iterator[str]:
    """Who waits holds no blocks and has computed nothing."""
    for request_id in state.waiting:
        request = state.request(request_id)
        if request.block_ids or request.num_computed_tokens or request.num_cached_blocks:
            yield f"{request_id} waits and holds {len(request.block_ids)} blocks"


def who_runs_has_room(scheduler: Scheduler, state: State) -> Iterator[str]:
    """Who runs holds blocks for all that is computed, as far as the model goes."""
    for request_id in state.running:
        request = state.request(request_id)
        tokens = min(request.num_computed_tokens, scheduler.config.max_model_len)
        if len(request.block_ids) * scheduler.config.block_size < tokens:
            yield f"{request_id} has {tokens} tokens in {len(request.block_ids)} blocks"


def seats_are_kept(scheduler: Scheduler, state: State) -> Iterator[str]:
    """At most ``max_num_seqs`` run."""
    if len(state.running) > scheduler.config.max_num_seqs:
        yield f"{len(state.running)} are running"


STATE_PROMISES: dict[str, StatePromise] = {
    "blocks are in one place": blocks_are_in_one_place,
    "references are counted": references_are_counted,
    "the cache is consistent": cache_is_consistent,
    "the queues are a partition": queues_are_a_partition,
    "who waits holds nothing": who_waits_holds_nothing,
    "who runs has room": who_runs_has_room,
    "seats are kept": seats_are_kept,
}


# --- Of a step --------------------------------------------------------------------------------


def admissions_preempt_nobody(
    _: Scheduler, before: State, outcome: StepOutcome, after: State
) -> Iterator[str]:
    """In a step that admits somebody nobody is preempted, and everybody who ran goes on or ends."""
    admitted = [request_id for request_id, _ in outcome.num_cached_tokens]
    if admitted and outcome.preempted:
        yield f"{outcome.preempted} were preempted, and {admitted} admitted"
    ended = {request_id for request_id, _ in outcome.finished}
    gone = {*before.running} - {*after.running} - {*outcome.preempted} - ended
    if gone:
        yield f"{sorted(gone)} ran, and neither go on nor ended nor were preempted"


def preempted_are_not_scheduled(
    _: Scheduler, before: State, outcome: StepOutcome, __: State
) -> Iterator[str]:
    """Who is preempted ran before, and computes nothing in that step."""
    scheduled = {request_id for request_id, _ in outcome.num_scheduled_tokens}
    if {*outcome.preempted} - {*before.running} or {*outcome.preempted} & scheduled:
        yield f"{outcome.preempted} were preempted, {sorted(scheduled)} scheduled"


def budgets_are_kept(
    scheduler: Scheduler, before: State, outcome: StepOutcome, _: State
) -> Iterator[str]:
    """A step schedules at most its budget, at least a token each, and the threshold at most."""
    total = sum(num_tokens for _, num_tokens in outcome.num_scheduled_tokens)
    if total > scheduler.token_budget():
        yield f"{total} tokens of {scheduler.token_budget()}"
    threshold = scheduler.long_prefill_token_threshold(before)
    for request_id, num_tokens in outcome.num_scheduled_tokens:
        if num_tokens < 1 or 0 < threshold < num_tokens:
            yield f"{request_id} got {num_tokens} tokens; the threshold is {threshold}"


def the_first_are_served_first(
    scheduler: Scheduler, before: State, outcome: StepOutcome, after: State
) -> Iterator[str]:
    """Who is admitted comes from the head; who isn't keeps their order, those preempted before it.

    By priority, everybody who waits is in the order of priority.
    """
    admitted = tuple(request_id for request_id, _ in outcome.num_cached_tokens)
    if before.waiting[: len(admitted)] != admitted:
        yield f"{admitted} were admitted, and {before.waiting} waited"
    left = before.waiting[len(admitted) :]
    expected = (*reversed(outcome.preempted), *left)
    if scheduler.config.policy == "priority":
        expected = tuple(sorted(expected, key=lambda r: scheduler.priority_key(after.request(r))))
    if after.waiting != expected:
        yield f"{after.waiting} wait, not {expected}"


def order_of_admission_stays(
    _: Scheduler, before: State, outcome: StepOutcome, after: State
) -> Iterator[str]:
    """Who runs stands in the order of their admission."""
    admitted = tuple(request_id for request_id, _ in outcome.num_cached_tokens)
    ended = {request_id for request_id, _ in outcome.finished}
    gone = {*outcome.preempted, *ended}
    expected = tuple(r for r in (*before.running, *admitted) if r not in gone)
    if after.running != expected:
        yield f"{after.running} run, not {expected}"


STEP_PROMISES: dict[str, StepPromise] = {
    "admissions preempt nobody": admissions_preempt_nobody,
    "who is preempted is not scheduled": preempted_are_not_scheduled,
    "budgets are kept": budgets_are_kept,
    "the first are served first": the_first_are_served_first,
    "the order of admission stays": order_of_admission_stays,
}
