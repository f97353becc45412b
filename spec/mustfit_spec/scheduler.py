"""The scheduler: running requests, then waiting ones, then the step's output.

Sources are those of vLLM 0.22.1, below ``vllm/``.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from mustfit_spec.config import Config, ConfigError
from mustfit_spec.kv_cache_manager import KVCacheManager
from mustfit_spec.rules import rule
from mustfit_spec.scenario import NewRequest
from mustfit_spec.state import Request, RequestStatus, State
from mustfit_spec.trace import FinishReason


class SchedulerFailure(Exception):
    """The scheduler contradicts itself here: vLLM's own assertion fails."""


@attrs.frozen(kw_only=True)
class Step:
    """A step being put together.

    Attributes:
        state: The state so far.
        token_budget: Tokens that may still be scheduled.
        long_prefill_token_threshold: Most tokens that one request gets; 0: no limit.
        req_index: The place in ``running`` that is considered next.
        num_scheduled_tokens: Who was scheduled and with how many tokens, in that order.
        preempted: Who was preempted.
        num_cached_tokens: Who was admitted, and how many of their tokens were cached.
    """

    state: State
    token_budget: int
    long_prefill_token_threshold: int
    req_index: int = 0
    num_scheduled_tokens: tuple[tuple[str, int], ...] = ()
    preempted: tuple[str, ...] = ()
    num_cached_tokens: tuple[tuple[str, int], ...] = ()

    def scheduled(self, request_id: str, num_tokens: int) -> Step:
        """The same, with so many tokens of that request scheduled."""
        return attrs.evolve(
            self,
            token_budget=self.token_budget - num_tokens,
            num_scheduled_tokens=(*self.num_scheduled_tokens, (request_id, num_tokens)),
        )


@attrs.frozen(kw_only=True)
class StepOutcome:
    """What a step did.

    Attributes:
        num_scheduled_tokens: Who was scheduled and with how many tokens, in that order.
        preempted: Who was preempted, in that order.
        num_cached_tokens: Who was admitted, and how many of their tokens were cached.
        finished: Who ended with the step's output, and why. Empty until the output is in.
    """

    num_scheduled_tokens: tuple[tuple[str, int], ...]
    preempted: tuple[str, ...]
    num_cached_tokens: tuple[tuple[str, int], ...]
    finished: tuple[tuple[str, FinishReason], ...] = ()


@attrs.frozen
class Scheduler(KVCacheManager):
    """vLLM's scheduler as of 0.21.0. Later revisions override what changed (``revisions.py``).

    Attributes:
        lacks: Configuration fields that this revision doesn't have: they must be left alone.
        moot: Rules that can't come into play in this revision.

    Raises:
        ConfigError: For a configuration that sets a field which this revision lacks.
    """

    lacks: ClassVar[frozenset[str]] = frozenset()
    moot: ClassVar[frozenset[str]] = frozenset()

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(Config):
            if field.name in self.lacks and getattr(self.config, field.name) != field.default:
                raise ConfigError(f"{field.name} does not exist in {type(self).__name__}")

    # --- A step -------------------------------------------------------------------------------

    def step(self, state: State) -> tuple[State, StepOutcome]:
        """One whole step: schedule, let the model run, take its output in.

        Raises:
            SchedulerFailure: Where vLLM's own assertions fail.
        """
        state, outcome = self.schedule(state)
        return self.update_from_output(state, outcome)

    @rule("STEP-ORDER", "0.22.1 v1/core/sched/scheduler.py:365-367,545-548")
    def schedule(self, state: State) -> tuple[State, StepOutcome]:
        """Running requests are scheduled first, then waiting ones are admitted.

        Returns:
            The state with blocks taken and tokens counted as computed, and what was scheduled.

        Raises:
            SchedulerFailure: Where vLLM's own assertions fail.
        """
        step = Step(
            state=state,
            token_budget=self.token_budget(),
            long_prefill_token_threshold=self.long_prefill_token_threshold(state),
        )
        step = self.schedule_running(step)
        if not self.preemption_bars_admission(step):
            step = self.schedule_waiting(step)
        outcome = StepOutcome(
            num_scheduled_tokens=step.num_scheduled_tokens,
            preempted=step.preempted,
            num_cached_tokens=step.num_cached_tokens,
        )
        self.assert_scheduled(outcome)
        return self.advance(step.state, outcome), outcome

    @rule("STEP-BUDGET", "0.22.1 v1/core/sched/scheduler.py:104-108,348")
    def token_budget(self) -> int:
        """The budget is ``max_num_scheduled_tokens``, or if that isn't set the tokens batched."""
        return self.config.max_num_scheduled_tokens or self.config.max_num_batched_tokens

    @rule("STEP-THRESHOLD", "0.22.1 v1/core/sched/scheduler.py:390-391,655-657")
    def long_prefill_token_threshold(self, state: State) -> int:  # noqa: ARG002
        """No request gets more than ``long_prefill_token_threshold`` tokens in a step."""
        return self.config.long_prefill_token_threshold

    def capped(self, step: Step, num_tokens: int) -> int:
        """So many tokens, but no more than the threshold, if there is one."""
        threshold = step.long_prefill_token_threshold
        return threshold if 0 < threshold < num_tokens else num_tokens

    # --- The running loop ---------------------------------------------------------------------

    @rule("RUN-ORDER", "0.22.1 v1/core/sched/scheduler.py:365-367,498-499")
    def schedule_running(self, step: Step) -> Step:
        """Running requests are scheduled in the order of their admission, while budget is left."""
        while step.req_index < len(step.state.running) and step.token_budget > 0:
            request = step.state.request(step.state.running[step.req_index])
            num_new_tokens = self.num_new_tokens_of_running(step, request)
            if num_new_tokens == 0:
                step = self.pass_over(step)
                continue
            step = self.make_room(step, request, num_new_tokens)
            if request.request_id not in step.state.running and self.self_preemption_ends_loop():
                break
        return step

    @rule("RUN-TOKENS", "0.22.1 v1/core/sched/scheduler.py:385-398")
    def num_new_tokens_of_running(self, step: Step, request: Request) -> int:
        """A running request gets the tokens it has yet to compute, as far as the limits allow.

        The limits are the threshold, the budget, and ``max_model_len - 1``.
        """
        num_new_tokens = request.num_tokens - request.num_computed_tokens
        num_new_tokens = min(self.capped(step, num_new_tokens), step.token_budget)
        return min(num_new_tokens, self.tokens_to_model_end(request))

    @rule("RUN-MODEL-LEN", "0.22.1 v1/core/sched/scheduler.py:396-398")
    def tokens_to_model_end(self, request: Request) -> int:
        """A running request never computes its ``max_model_len``-th token."""
        return self.config.max_model_len - 1 - request.num_computed_tokens

    @rule("RUN-PASS-OVER", "0.22.1 v1/core/sched/scheduler.py:423,438-439")
    def pass_over(self, step: Step) -> Step:
        """A running request with nothing to compute is passed over; those behind it are not."""
        return attrs.evolve(step, req_index=step.req_index + 1)

    @rule("RUN-PREEMPT", "0.22.1 v1/core/sched/scheduler.py:443-487")
    def make_room(self, step: Step, request: Request, num_new_tokens: int) -> Step:
        """While the chunk of a running request doesn't fit, somebody running is preempted.

        That goes on until it fits, or until the request itself is the one preempted. The gate
        doesn't apply to running requests.
        """
        while (state := self.allocate_for_running(step.state, request, num_new_tokens)) is None:
            victim = self.victim(step.state)
            step = self.preempt_in_step(step, victim)
            if victim == request.request_id:
                return step
        step = attrs.evolve(step, state=state, req_index=step.req_index + 1)
        return step.scheduled(request.request_id, num_new_tokens)

    @rule("RUN-NO-GATE", "0.22.1 v1/core/sched/scheduler.py:444-448")
    def allocate_for_running(
        self, state: State, request: Request, num_new_tokens: int
    ) -> State | None:
        """For a running request only the chunk has to fit, and its lookahead slots.

        What it takes to finish doesn't matter.
        """
        return self.allocate_slots(
            state,
            request,
            num_new_tokens,
            num_lookahead_tokens=self.config.num_lookahead_tokens,
        )

    # --- Preemption ---------------------------------------------------------------------------

    @rule("PREEMPT-VICTIM", "0.22.1 v1/core/sched/scheduler.py:456-461,480-481")
    def victim(self, state: State) -> str:
        """The victim is the last of ``running``; by priority, the largest in priority and arrival.

        Of several equally large, the first in ``running``.
        """
        if self.config.policy == "fcfs":
            return state.running[-1]
        return max(state.running, key=lambda r: self.priority_key(state.request(r))[:2])

    @rule("PREEMPT-REFUND", "0.22.1 v1/core/sched/scheduler.py:462-466")
    def preempt_in_step(self, step: Step, victim: str) -> Step:
        """A victim that was already scheduled in this step gives its tokens back to the budget."""
        refund = sum(n for request_id, n in step.num_scheduled_tokens if request_id == victim)
        return attrs.evolve(
            step,
            state=self.preempt(step.state, victim),
            token_budget=step.token_budget + refund,
            req_index=self.req_index_after(step, victim),
            num_scheduled_tokens=tuple(s for s in step.num_scheduled_tokens if s[0] != victim),
            preempted=(*step.preempted, victim),
        )

    @rule("PREEMPT-INDEX", "0.22.1 v1/core/sched/scheduler.py:461-462,479")
    def req_index_after(self, step: Step, victim: str) -> int:
        """Whoever comes next keeps the turn if the victim had been scheduled in this step.

        A victim that stood before them and had been passed over costs somebody their turn.
        """
        had_turn = any(request_id == victim for request_id, _ in step.num_scheduled_tokens)
        return step.req_index - 1 if had_turn else step.req_index

    @rule("PREEMPT-SELF", "0.22.1 v1/core/sched/scheduler.py:485-491")
    def self_preemption_ends_loop(self) -> bool:
        """A request that has to preempt itself ends the running loop, for those behind it too."""
        return True

    @rule("PREEMPT-FREE", "0.22.1 v1/core/sched/scheduler.py:938-941")
    def preempt(self, state: State, victim: str) -> State:
        """A preempted request gives up all its blocks and keeps its output.

        All its tokens, prompt and output, have to be computed again, or hit.
        """
        state = self.free(state, state.request(victim))
        request = attrs.evolve(
            state.request(victim), status=RequestStatus.PREEMPTED, num_computed_tokens=0
        )
        state = state.with_request(request)
        state = attrs.evolve(state, running=tuple(r for r in state.running if r != victim))
        return self.requeue(state, request)

    @rule(
        "PREEMPT-REQUEUE",
        "0.22.1 v1/core/sched/scheduler.py:949, v1/core/sched/request_queue.py:94,165",
    )
    def requeue(self, state: State, request: Request) -> State:
        """A preempted request goes to the head of ``waiting``; by priority, to its place there."""
        if self.config.policy == "fcfs":
            return attrs.evolve(state, waiting=(request.request_id, *state.waiting))
        return self.enqueue(state, request)

    # --- The waiting loop ---------------------------------------------------------------------

    @rule("WAIT-AFTER-PREEMPT", "0.22.1 v1/core/sched/scheduler.py:545")
    def preemption_bars_admission(self, step: Step) -> bool:
        """In a step that preempted somebody, nobody is admitted."""
        return bool(step.preempted)

    @rule("WAIT-LOOP", "0.22.1 v1/core/sched/scheduler.py:548-555,733-740")
    def schedule_waiting(self, step: Step) -> Step:
        """Waiting requests are admitted from the head on, while budget and seats are left.

        The first that can't be admitted ends the loop, for everybody behind it.
        """
        while step.state.waiting and step.token_budget > 0 and self.has_free_seat(step.state):
            head = step.state.request(step.state.waiting[0])
            admitted = self.try_to_admit(step, head)
            if admitted is None:
                return self.blocked(step, head)
            step = admitted
        return step

    @rule("WAIT-BLOCKED", "0.22.1 v1/core/sched/scheduler.py:555,733-740")
    def blocked(self, step: Step, head: Request) -> Step:  # noqa: ARG002
        """For a head that can't be admitted nothing is done, and nobody is preempted for it.

        It was looked at, not taken off: it keeps its place, is tried again in the next step, and
        so on without limit. That goes for the gate on and off.
        """
        return step

    @rule("WAIT-SEATS", "0.22.1 v1/core/sched/scheduler.py:549-550")
    def has_free_seat(self, state: State) -> bool:
        """Admission goes on while fewer than ``max_num_seqs`` requests are running."""
        return len(state.running) < self.config.max_num_seqs

    @rule("WAIT-GATE", "0.22.1 v1/core/sched/scheduler.py:591-595,721-740")
    def try_to_admit(self, step: Step, request: Request) -> Step | None:
        """A waiting request is admitted if its allocation succeeds, the gate applying if it's on.

        Its prefix is looked up at each attempt. With the gate off, only the chunk has to fit.
        """
        new_computed_blocks = self.get_computed_blocks(step.state, request)
        num_computed_tokens = len(new_computed_blocks) * self.config.block_size
        num_new_tokens = self.num_new_tokens_of_waiting(step, request, num_computed_tokens)
        if num_new_tokens is None:
            return None
        state = self.allocate_slots(
            step.state,
            request,
            num_new_tokens,
            new_computed_blocks=new_computed_blocks,
            num_lookahead_tokens=self.lookahead_of_waiting(),
            full_sequence_must_fit=self.config.scheduler_reserve_full_isl,
            has_scheduled_reqs=bool(step.state.running),
        )
        if state is None:
            return None
        state = self.admit(state, request.request_id, num_computed_tokens)
        return attrs.evolve(
            step.scheduled(request.request_id, num_new_tokens),
            state=state,
            num_cached_tokens=(
                *step.num_cached_tokens,
                (request.request_id, num_computed_tokens),
            ),
        )

    @rule("WAIT-TOKENS", "0.22.1 v1/core/sched/scheduler.py:654-657,669")
    def num_new_tokens_of_waiting(
        self, step: Step, request: Request, num_computed_tokens: int
    ) -> int | None:
        """A waiting request gets what its prefix hit leaves of all its tokens, output included.

        The threshold and the budget limit that. Returns ``None`` if it may not start.
        """
        num_new_tokens = self.capped(step, request.num_tokens - num_computed_tokens)
        if self.would_be_chunked(step, num_new_tokens) and not self.config.enable_chunked_prefill:
            return None
        return min(num_new_tokens, step.token_budget)

    @rule("WAIT-CHUNKED", "0.22.1 v1/core/sched/scheduler.py:661-667")
    def would_be_chunked(self, step: Step, num_new_tokens: int) -> bool:
        """Without chunked prefill, a request that needs more than is left of the budget waits."""
        return num_new_tokens > step.token_budget

    @rule("WAIT-LOOKAHEAD", "0.22.1 v1/core/sched/scheduler.py:705-707")
    def lookahead_of_waiting(self) -> int:
        """An admission takes no lookahead slots."""
        return 0

    @rule("WAIT-ADMIT", "0.22.1 v1/core/sched/scheduler.py:762,784,803-804")
    def admit(self, state: State, request_id: str, num_computed_tokens: int) -> State:
        """An admitted request leaves the head of ``waiting`` and is the last of ``running``."""
        request = attrs.evolve(
            state.request(request_id),
            status=RequestStatus.RUNNING,
            num_computed_tokens=num_computed_tokens,
        )
        return attrs.evolve(
            state.with_request(request),
            waiting=state.waiting[1:],
            running=(*state.running, request_id),
        )

    # --- The step's output --------------------------------------------------------------------

    @rule("STEP-ADVANCE", "0.22.1 v1/core/sched/scheduler.py:961-964")
    def advance(self, state: State, outcome: StepOutcome) -> State:
        """Scheduled tokens count as computed as soon as the step is scheduled."""
        for request_id, num_tokens in outcome.num_scheduled_tokens:
            request = state.request(request_id)
            state = state.with_request(
                attrs.evolve(request, num_computed_tokens=request.num_computed_tokens + num_tokens)
            )
        return state

    @rule(
        "STEP-OUTPUT",
        "0.22.1 v1/core/sched/scheduler.py:1347,1407-1410,1474-1485,1529-1530,1656-1664",
    )
    def update_from_output(self, state: State, outcome: StepOutcome) -> tuple[State, StepOutcome]:
        """Each scheduled request that has computed all its tokens gets one more.

        Those that end with it are freed at once, in the order they were scheduled.
        """
        for request_id, _ in outcome.num_scheduled_tokens:
            request = state.request(request_id)
            if request.num_computed_tokens < request.num_tokens:
                continue
            request = attrs.evolve(request, num_output_tokens=request.num_output_tokens + 1)
            state = state.with_request(request)
            reason = self.finish_reason(request)
            if reason is not None:
                state = self.finish(state, request_id)
                outcome = attrs.evolve(outcome, finished=(*outcome.finished, (request_id, reason)))
        return state, outcome

    @rule("STEP-ASSERT", "0.22.1 v1/core/sched/scheduler.py:827,1348")
    def assert_scheduled(self, outcome: StepOutcome) -> None:
        """A step that scheduled fewer tokens than one, or more than its budget, fails.

        On vLLM's own assertions. A request beyond ``max_model_len`` gets a negative number of
        tokens, which the others may use; if it is preempted then, they have used too many.
        """
        for request_id, num_tokens in outcome.num_scheduled_tokens:
            if num_tokens <= 0:
                raise SchedulerFailure(f"{request_id} was scheduled with {num_tokens} tokens")
        total = sum(num_tokens for _, num_tokens in outcome.num_scheduled_tokens)
        if total > self.token_budget():
            raise SchedulerFailure(f"{total} tokens were scheduled of {self.token_budget()}")

    @rule("STEP-STOP", "0.22.1 v1/core/sched/utils.py:100-117")
    def finish_reason(self, request: Request) -> FinishReason | None:
        """Before ``min_tokens`` nothing ends a request; then a stop token or a length limit does.

        The limits are ``max_model_len`` and ``max_tokens``. ``min_tokens`` goes before both.
        """
        if request.num_output_tokens < request.given.min_tokens:
            return None
        return self.finish_reason_past_minimum(request)

    def finish_reason_past_minimum(self, request: Request) -> FinishReason | None:
        """Why a request ends, ``min_tokens`` aside."""
        last_token = request.all_token_ids[-1]
        if last_token == request.given.eos_token_id or last_token in request.given.stop_token_ids:
            return "stop"
        if (
            request.num_tokens >= self.config.max_model_len
            or request.num_output_tokens >= request.given.output_limit
        ):
            return "length"
        return None

    @rule(
        "STEP-FINISH",
        "0.22.1 v1/core/sched/scheduler.py:1480,1529-1530,1821-1824,1838,1855-1856,1862-1863",
    )
    def finish(self, state: State, request_id: str) -> State:
        """A request that ends leaves its queue and gives up its blocks, whatever ended it."""
        state = self.free(state, state.request(request_id))
        return attrs.evolve(
            state,
            requests=tuple(r for r in state.requests if r.request_id != request_id),
            waiting=tuple(r for r in state.waiting if r != request_id),
            running=tuple(r for r in state.running if r != request_id),
        )

    # --- From outside -------------------------------------------------------------------------

    def add_request(self, state: State, given: NewRequest) -> State:
        """A new request starts to wait."""
        request = Request(given=given)
        state = attrs.evolve(state, requests=(*state.requests, request))
        return self.enqueue(state, request)

    @rule("WAIT-ORDER", "0.22.1 v1/core/sched/request_queue.py:80,146, v1/request.py:306-311")
    def enqueue(self, state: State, request: Request) -> State:
        """A new request waits behind all others; by priority, behind those that come before it.

        That is by priority, then arrival, then id, the smaller first.
        """
        if self.config.policy == "fcfs":
            return attrs.evolve(state, waiting=(*state.waiting, request.request_id))
        everybody = (*state.waiting, request.request_id)
        return attrs.evolve(
            state,
            waiting=tuple(sorted(everybody, key=lambda r: self.priority_key(state.request(r)))),
        )

    def priority_key(self, request: Request) -> tuple[int, int, str]:
        """Where a request stands under the priority policy; the smallest is served first."""
        return (request.given.priority, request.given.arrival_time, request.request_id)

    @rule("STEP-ABORT", "0.22.1 v1/core/sched/scheduler.py:1806-1838")
    def abort(self, state: State, request_id: str) -> State:
        """An aborted request ends at once, waiting or running; one that has ended is left alone."""
        return self.finish(state, request_id) if state.has(request_id) else state

    @rule("STEP-RESET", "0.22.1 v1/core/sched/scheduler.py:1906,1914-1916,1932")
    def reset_prefix_cache(self, state: State, *, reset_running_requests: bool = False) -> State:
        """A reset may first preempt everybody who runs, the last first, so that it can succeed.

        They may be admitted again in the very next step.
        """
        if reset_running_requests:
            for request_id in reversed(state.running):
                state = self.preempt(state, request_id)
        return self.reset(state)
