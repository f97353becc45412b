"""The scheduler, to be embedded in a simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mustfit_impl.block_pool import BlockPool
from mustfit_impl.decoders import Decoders
from mustfit_impl.prefix_cache import Hit
from mustfit_impl.queues import FcfsQueue, PriorityQueue
from mustfit_impl.request import NEVER, HashedRequest, Request, RequestError, request_of
from mustfit_impl.semantics import NEWEST, REVISIONS
from mustfit_spec import Config, FinishReason, NewRequest, SchedulerFailure, StepTrace


class StepOutcome(NamedTuple):
    """What a step did. Steps that did the same may share one.

    Attributes:
        num_scheduled_tokens: Tokens scheduled, for each request that got any, in that order.
        preempted: Who was preempted, in that order.
        num_cached_tokens: For each request that was admitted, tokens found in the prefix cache.
        finished: Who ended with the step's output, and why.
    """

    num_scheduled_tokens: Mapping[str, int]
    preempted: tuple[str, ...]
    num_cached_tokens: Mapping[str, int]
    finished: Mapping[str, FinishReason]


class Run(NamedTuple):
    """Consecutive steps that did the same, and after each of which the queues were the same.

    Attributes:
        outcome: What each of them did.
        steps: How many there are, at least one.
    """

    outcome: StepOutcome
    steps: int


#: Makes one of the named tuples above, in half the time that calling its class takes.
_new = tuple.__new__


class Scheduler:
    """vLLM's scheduler as of some revision: what it decides, step by step.

    A step is what vLLM does in ``schedule`` and, once the model has run, in ``update_from_output``.
    Where the time between them matters, it is the caller's: a step takes no time here.

    Args:
        config: The configuration, in vLLM's own names.
        revision: The first vLLM release of the revision, one of ``REVISIONS``. The newest if it
            isn't given.
        refuse_overlong: Whether prompts that leave no token of ``max_model_len`` to sample are
            refused, as vLLM's front end does. Its scheduler itself takes them.

    Raises:
        KeyError: There is no such revision.
        ConfigError: The revision doesn't have a field that the configuration sets.
    """

    def __init__(
        self, *, config: Config, revision: str = NEWEST, refuse_overlong: bool = True
    ) -> None:
        if revision not in REVISIONS:
            raise KeyError(f"there is no revision {revision!r}; there are: {', '.join(REVISIONS)}")
        semantics = REVISIONS[revision]
        semantics.check(config)
        self.config = config
        self.revision = revision
        self._refuse_overlong = refuse_overlong
        self._semantics = semantics
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._waiting: FcfsQueue | PriorityQueue = (
            FcfsQueue() if config.policy == "fcfs" else PriorityQueue()
        )
        self._pool = BlockPool(
            num_gpu_blocks=config.num_gpu_blocks,
            freed_to_head=semantics.freed_to_head,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        # Who was refused last, with what limits, and how much had happened by then.
        self._refused: Request | None = None
        self._refused_limits: tuple[int, int] | None = None
        self._refused_cache = 0
        self._refused_releases = 0

        # What a step reads, out of the configuration and of the semantics.
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._last_token = config.max_model_len - 1
        self._caches = config.enable_prefix_caching
        self._gate = config.scheduler_reserve_full_isl
        self._token_budget = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        if semantics.batched_tokens_limit_budget:
            self._token_budget = min(self._token_budget, config.max_num_batched_tokens)
        self._seats = config.max_num_active_seqs or config.max_num_seqs
        self._watermark_blocks = int(config.watermark * config.num_gpu_blocks)
        self._lookahead = config.num_lookahead_tokens
        self._admission_lookahead = self._lookahead if semantics.admission_takes_lookahead else 0
        self._self_preemption_ends_loop = (
            config.policy == "fcfs" or semantics.self_preemption_ends_priority_loop
        )

        # Those running are decoders, who need no looking at, or others, in order of admission.
        self._decoders = Decoders()
        self._others: list[Request] = []
        # The outcome if all who run decode: what was handed out is replaced, never changed.
        self._one_each = StepOutcome({}, (), {}, {})
        # Steps that are known to be made by decoders alone.
        self._stride = 0
        self._num_recomputed_tokens = 0

    # --- From outside -------------------------------------------------------------------------

    def add_request(self, request: NewRequest | HashedRequest) -> None:
        """A new request starts to wait.

        Raises:
            RequestError: A live request has this id, or the prompt is too long, or lacks names of
                its blocks. Nothing has changed then.

        Source: vLLM 0.33.0 v1/core/sched/scheduler.py:2932-2949,
        v1/engine/input_processor.py:566-601.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request {request.request_id!r} is there already")
        added = request_of(
            request,
            block_size=self.config.block_size,
            max_model_len=self.config.max_model_len,
            min_tokens_counts=self._semantics.min_tokens_counts,
        )
        if self._refuse_overlong and added.num_prompt_tokens >= self.config.max_model_len:
            raise RequestError(
                f"request {request.request_id!r}: a prompt of {added.num_prompt_tokens} tokens "
                f"leaves none to sample; max_model_len is {self.config.max_model_len}"
            )
        self._stride = 0
        self._requests[added.request_id] = added
        self._waiting.add(added)

    def abort(self, request_id: str) -> bool:
        """A request ends at once, waiting or running. Whether it was there to be ended.

        Source: vLLM 0.33.0 v1/core/sched/scheduler.py:2979-3029.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._stride = 0
        if request.running:
            self._running.remove(request)
            self._run_no_more((request.request_id,))
            if request.entry:
                self._decoders.leave(request)
            else:
                self._others.remove(request)
        else:
            self._waiting.remove(request)
        self._end(request)
        return True

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache, if no request holds a block. Whether it did.

        Args:
            reset_running_requests: Whether all running requests are preempted first.

        Source: vLLM 0.33.0 v1/core/sched/scheduler.py:3194-3227.
        """
        self._stride = 0
        if reset_running_requests:
            self._look_at_everybody()
            while self._running:
                self._preempt(len(self._running) - 1)
        return self._pool.reset()

    def step(self) -> StepOutcome:
        """One whole step: schedule, let the model run, take its output in.

        Raises:
            SchedulerFailure: Where vLLM's own assertions fail. The scheduler is of no use then.

        Source: vLLM 0.33.0 v1/core/sched/scheduler.py:700-1784,2264-2676.
        """
        return self.advance(1).outcome

    def advance(  # noqa: C901 - in one piece, because calls cost
        self, max_steps: int, *, same_blocks: bool = False
    ) -> Run:
        """The next steps, as many as are known to do the same, at least one.

        Args:
            max_steps: How many at most, at least one.
            same_blocks: Whether they end where a block is taken or filled, so that after each of
                them all that ``observe`` shows is the same, too.

        Raises:
            SchedulerFailure: Where vLLM's own assertions fail. The scheduler is of no use then.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, not {max_steps}")
        decoders = self._decoders
        taken = 0
        while taken < max_steps:
            stride = self._stride
            if not stride:
                if self._others or self._may_admit():
                    break
                stride = decoders.steps()
            if stride:
                steps = max_steps - taken
                if steps > stride:
                    steps = stride
                self._stride = stride - steps
                decoders.clock += steps
                taken += steps
            elif taken and (self._waiting or decoders.somebody_ends()):
                # The next step may be another than those so far.
                break
            else:
                outcome = self._step_of_decoders()
                if outcome is None:
                    break
                taken += 1
                if outcome.finished:
                    return _new(Run, (outcome, taken))
            if same_blocks:
                break
        return _new(Run, (self._one_each, taken) if taken else (self._step(), 1))

    # --- What can be seen ---------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Requests in ``running``."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait, preempted ones among them."""
        return len(self._waiting)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, inactive cached ones among them."""
        return len(self._pool.free)

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens that were computed again, having been computed before a preemption, so far.

        Takes time with the number of running requests.
        """
        # A decoder's numbers are out of date, but have passed whatever was computed before.
        running = (request.num_recomputed_tokens() for request in self._running)
        return self._num_recomputed_tokens + sum(running)

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of those running, in order of admission."""
        return tuple(request.request_id for request in self._running)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of those who wait, the one that is served next first."""
        return tuple(request.request_id for request in self._waiting)

    def head(self) -> str | None:
        """Who is the first of those who wait, if anybody does."""
        return self._waiting.head().request_id if self._waiting else None

    def observe(self, outcome: StepOutcome) -> StepTrace:
        """The trace of the step just taken, at profile ``identity``.

        Takes time with the size of the pool.

        Args:
            outcome: What that step did.
        """
        pool, cache = self._pool, self._pool.cache
        cached = [
            (block_id, *branch.later.get(place, ()))
            for block_id, (branch, place) in enumerate(
                zip(cache.branch_of, cache.place_of, strict=True)
            )
            if branch is not None and branch.block_ids[place] == block_id
        ]
        running = self._running
        return StepTrace(
            num_scheduled_tokens=dict(outcome.num_scheduled_tokens),
            preempted=outcome.preempted,
            finished=tuple(outcome.finished),
            running=self.running,
            waiting=self.waiting,
            num_free_blocks=len(pool.free),
            num_cached_tokens=dict(outcome.num_cached_tokens),
            num_blocks={r.request_id: len(r.block_ids) for r in running},
            finish_reasons=dict(outcome.finished),
            block_ids={r.request_id: tuple(r.block_ids) for r in running},
            free_block_ids=tuple(pool.free),
            cached_block_ids=tuple(cached),
        )

    # --- A step -------------------------------------------------------------------------------

    def _may_admit(self) -> bool:
        """Whether somebody might be admitted if all who run decode, or not all of them can."""
        num_running = len(self._running)
        left = self._token_budget - num_running
        if left <= 0 or not self._waiting or num_running >= self._seats:
            return False
        return not self._is_known_to_be_refused(self._waiting.head(), left)

    def _step_of_decoders(self) -> StepOutcome | None:
        """A step in which all who run decode, and nobody can be admitted.

        Returns:
            What it did, or ``None`` if there is more to it, and it is yet to be taken.
        """
        decoders, free = self._decoders, len(self._pool.free)
        due = decoders.due()
        if len(due) > 1:
            due.sort(key=self._running.index)
        counts: list[int] = []
        for request in due:
            count = self._blocks_wanted(request, 1)
            free -= count
            if free < 0 or request.num_computed_tokens >= self._last_token:
                self._others = due
                return None
            counts.append(count)
        outcome = self._one_each
        changes = self._pool.cache.changes
        for request, count in zip(due, counts, strict=True):
            self._take(request, 1, count)
        if changes != self._pool.cache.changes and self._may_admit():
            # For what was just cached, or evicted. Nobody takes anything a second time.
            self._others = due
            return None
        decoders.clock += 1
        finished: dict[str, FinishReason] = {}
        for request in due:
            request.num_computed_tokens += 1
            request.num_tokens += 1
            if request.num_tokens < request.finish_at:
                self._decode(request)
            else:
                self._finish(request, finished)
        if not finished:
            return outcome
        self._remove_finished(finished)
        return _new(StepOutcome, (outcome.num_scheduled_tokens, (), {}, finished))

    def _step(self) -> StepOutcome:
        running, waiting = self._running, self._waiting
        threshold = self._threshold()
        self._others += self._decoders.due()
        preempted: list[str] = []
        chunks = self._schedule_others(threshold)
        if chunks is None:
            self._look_at_everybody()
            chunks = {}
            budget = self._schedule_running(threshold, chunks, preempted)
            scheduled = {request.request_id: chunk for request, chunk in chunks.items()}
        else:
            budget = self._token_budget - self._decoders.size - sum(chunks.values())
            scheduled = self._with_decoders(chunks)
        admitted: dict[str, int] = {}
        if not preempted:
            while waiting and budget > 0 and len(running) < self._seats:
                request = waiting.head()
                chunk = self._admit(request, budget, threshold)
                if not chunk:
                    break
                admitted[request.request_id] = request.num_computed_tokens
                scheduled[request.request_id] = chunks[request] = chunk
                budget -= chunk
        if admitted:
            ones = dict(self._one_each.num_scheduled_tokens)
            for request_id in admitted:
                ones[request_id] = 1
            self._one_each = _new(StepOutcome, (ones, (), {}, {}))
        if self._semantics.negative_chunks:
            self._assert(chunks, budget)
        finished = self._update_from_output(chunks)
        return _new(StepOutcome, (scheduled, tuple(preempted), admitted, finished))

    def _with_decoders(self, chunks: Mapping[Request, int]) -> dict[str, int]:
        """Who gets how many tokens, decoders and others, in order of admission."""
        scheduled = dict(self._one_each.num_scheduled_tokens)
        for request in self._others:
            if request in chunks:
                scheduled[request.request_id] = chunks[request]
            else:
                del scheduled[request.request_id]
        return scheduled

    def _look_at_everybody(self) -> None:
        """Nobody is left to the decoders."""
        for request in self._running:
            if request.entry:
                self._decoders.leave(request)
        self._others = self._running.copy()

    def _schedule_others(self, threshold: int) -> dict[Request, int] | None:
        """Schedules those running who aren't decoders, if that is all there is to it.

        Returns:
            Who gets how many tokens, or ``None`` if nothing was done, because somebody would have
            to be preempted, or because who gets what depends on the decoders' places.
        """
        others = self._others
        budget = self._token_budget - self._decoders.size
        if len(others) > 1:
            others.sort(key=self._running.index)
        free = len(self._pool.free)
        chunks: dict[Request, int] = {}
        wanted: list[int] = []
        for place, request in enumerate(others, start=-len(others)):
            chunk = self._chunk(request, NEVER, threshold)
            if chunk > budget:
                if self._running[place:] != others[place:]:
                    return None
                chunk = budget
            if not chunk:
                continue
            count = self._blocks_wanted(request, chunk)
            free -= count
            if free < 0:
                return None
            chunks[request] = chunk
            wanted.append(count)
            budget -= chunk
        for (request, chunk), count in zip(chunks.items(), wanted, strict=True):
            self._take(request, chunk, count)
        return chunks

    def _schedule_running(
        self, threshold: int, scheduled: dict[Request, int], preempted: list[str]
    ) -> int:
        """Schedules those running, one by one; who was, and who was preempted for it, is noted.

        Returns:
            What is left of the budget, in tokens.
        """
        running = self._running
        budget = self._token_budget
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            chunk = self._chunk(request, budget, threshold)
            if chunk == 0:
                index += 1
                continue
            while not self._allocate_running(request, chunk):
                place = self._victim()
                victim = running[place]
                refund = scheduled.pop(victim, 0)
                budget += refund
                if self._keeps_the_turn(place, index, had_turn=refund != 0):
                    index -= 1
                preempted.append(victim.request_id)
                self._preempt(place)
                if victim is request:
                    break
            else:
                scheduled[request] = chunk
                budget -= chunk
                index += 1
                continue
            if self._self_preemption_ends_loop:
                break
        return budget

    def _keeps_the_turn(self, place: int, index: int, *, had_turn: bool) -> bool:
        """Whether who comes next, at that index, still does after a victim left its place."""
        costs_a_turn = self._semantics.passed_over_victim_costs_a_turn
        return had_turn or (place < index and not costs_a_turn)

    def _threshold(self) -> int:
        """Most tokens that one request gets in this step."""
        threshold = self.config.long_prefill_token_threshold
        if not threshold:
            return NEVER
        if self._semantics.threshold_spares_a_lone_request:
            # Admissions and preemptions leave the sum as it was when the step began.
            num_eligible = len(self._running) + len(self._waiting)
            if num_eligible <= 1:
                return NEVER
            if self.config.long_prefill_token_threshold_adaptive:
                return max(threshold, self.config.max_num_batched_tokens // num_eligible)
        return threshold

    def _chunk(self, request: Request, budget: int, threshold: int) -> int:
        """Tokens that a running request is to compute."""
        chunk = request.num_tokens - request.num_computed_tokens
        if chunk > threshold:
            chunk = threshold
        if chunk > budget:
            chunk = budget
        to_model_end = self._last_token - request.num_computed_tokens
        if to_model_end < 0 and not self._semantics.negative_chunks:
            return 0
        return chunk if chunk < to_model_end else to_model_end

    def _blocks_wanted(self, request: Request, chunk: int) -> int:
        """Blocks that a running request lacks for a chunk."""
        slots = request.num_computed_tokens + chunk + self._lookahead
        count = self._blocks(slots) - len(request.block_ids)
        # A negative chunk lacks none.
        return count if count > 0 else 0

    def _allocate_running(self, request: Request, chunk: int) -> bool:
        """Blocks for a running request's chunk, if they are there."""
        count = self._blocks_wanted(request, chunk)
        if count > len(self._pool.free):
            return False
        self._take(request, chunk, count)
        return True

    def _take(self, request: Request, chunk: int, count: int) -> None:
        """So many blocks for a running request's chunk, if any; those that it fills are cached."""
        if count:
            request.block_ids += self._pool.take(count)
        self._cache(request, request.num_computed_tokens + chunk)

    def _victim(self) -> int:
        """The place in ``running`` of whom to preempt."""
        running = self._running
        if self.config.policy == "fcfs":
            return len(running) - 1
        return max(range(len(running)), key=lambda place: running[place].priority_key[:2])

    def _preempt(self, place: int) -> None:
        """Whoever has that place in ``running`` gives up all blocks and waits again."""
        request = self._running.pop(place)
        self._others.remove(request)
        self._run_no_more((request.request_id,))
        self._free(request)
        self._num_recomputed_tokens += request.num_recomputed_tokens()
        if request.num_computed_tokens > request.num_reached_tokens:
            request.num_reached_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0
        request.running = False
        self._waiting.requeue(request)

    def _admit(self, request: Request, budget: int, threshold: int) -> int:
        """Admits the head of those who wait, if it fits. With how many tokens; 0 if it doesn't."""
        if self._is_known_to_be_refused(request, budget):
            return 0
        pool = self._pool
        hit = self._lookup(request)
        hit_ids = hit[0]
        num_hit = len(hit_ids)
        computed = num_hit * self._block_size
        chunk = request.num_tokens - computed
        if chunk > threshold:
            chunk = threshold
        if chunk > budget:
            if not self.config.enable_chunked_prefill:
                return self._refuse(request, hit, (budget, threshold))
            chunk = budget
        free = self._free_for(hit_ids)
        if self._gate and self._blocks(request.num_tokens) > free:
            return self._refuse(request, hit, None)
        required = self._blocks(computed + chunk + self._admission_lookahead)
        if required > free:
            return self._refuse(request, hit, (budget, threshold))
        pool.touch(hit_ids)
        request.block_ids = hit_ids
        if required > num_hit:
            request.block_ids += pool.take(required - num_hit)
        request.tail = hit[1]
        request.num_cached_blocks = num_hit
        self._cache(request, computed + chunk)
        request.num_computed_tokens = request.num_hit_tokens = computed
        request.running = True
        self._waiting.remove(request)
        self._running.append(request)
        self._others.append(request)
        return chunk

    def _free_for(self, hit_ids: Iterable[int]) -> int:
        """Blocks that an admission may count on: those free, and those it hits that are held."""
        ref_cnt, free = self._pool.ref_cnt, len(self._pool.free)
        for block_id in hit_ids:
            if ref_cnt[block_id]:
                free += 1
        return free - self._watermark_blocks if self._running else free

    def _refuse(self, request: Request, hit: Hit, limits: tuple[int, int] | None) -> int:
        """Remembers that a request was refused. With no tokens.

        Args:
            request: Who was.
            hit: Its prefix hit.
            limits: Budget and threshold, or ``None`` if they don't matter, for the gate refused it.
        """
        pool = self._pool
        pool.cache.watch(hit)
        self._refused = request
        self._refused_limits = limits
        self._refused_cache = pool.cache.changes
        self._refused_releases = pool.releases
        return 0

    def _blocks(self, num_tokens: int) -> int:
        """Blocks for so many tokens, at most a model's."""
        if num_tokens > self._max_model_len:
            num_tokens = self._max_model_len
        return -(-num_tokens // self._block_size)

    def _is_known_to_be_refused(self, request: Request, budget: int) -> bool:
        """Whether it was refused before, and nothing has happened since that could change that.

        It lacks as many blocks as before, or more, until some are released or its hit changes. The
        gate doesn't ask how many tokens it is to compute; where its chunk didn't fit, they count.
        """
        pool, limits = self._pool, self._refused_limits
        return (
            self._refused is request
            and self._refused_cache == pool.cache.changes
            and self._refused_releases == pool.releases
            and (limits is None or limits == (budget, self._threshold()))
        )

    def _lookup(self, request: Request) -> Hit:
        """A request's prefix hit."""
        most = (request.num_tokens - 1) // self._block_size if self._caches else 0
        return self._pool.cache.find(request.contents(0, most))

    def _cache(self, request: Request, num_tokens: int) -> None:
        """Of a request's blocks, those filled by so many tokens enter the prefix cache."""
        start = request.num_cached_blocks
        # A prompt may be longer than the model, which has no blocks for the rest.
        end = min(num_tokens // self._block_size, len(request.block_ids))
        if end <= start or not self._caches:
            return
        cache = self._pool.cache
        request.tail = cache.enter(
            request.tail or cache.root, request.contents(start, end), request.block_ids[start:end]
        )
        request.num_cached_blocks = end

    def _assert(self, scheduled: Mapping[Request, int], budget: int) -> None:
        """Fails where vLLM's own assertions do, which only negative chunks can lead to."""
        for request, tokens in scheduled.items():
            if tokens <= 0:
                raise SchedulerFailure(f"{request.request_id} was scheduled with {tokens} tokens")
        if budget < 0:
            raise SchedulerFailure(
                f"{self._token_budget - budget} tokens were scheduled of {self._token_budget}"
            )

    # --- The step's output --------------------------------------------------------------------

    def _update_from_output(self, chunks: Mapping[Request, int]) -> dict[str, FinishReason]:
        """Each request that has computed all its tokens gets one more. Who ended, and why."""
        finished: dict[str, FinishReason] = {}
        self._decoders.clock += 1
        for request, chunk in chunks.items():
            request.num_computed_tokens += chunk
            if request.num_computed_tokens >= request.num_tokens:
                request.num_tokens += 1
                if request.num_tokens >= request.finish_at:
                    self._finish(request, finished)
        if finished:
            self._remove_finished(finished)
        if self._others:
            self._let_decode()
        return finished

    def _finish(self, request: Request, finished: dict[str, FinishReason]) -> None:
        """A request has got its last token."""
        finished[request.request_id] = request.finish_reason
        self._end(request)

    def _remove_finished(self, finished: Iterable[str]) -> None:
        """Those who have ended run no more."""
        self._running = [request for request in self._running if request.running]
        self._others = [request for request in self._others if request.running]
        self._run_no_more(finished)

    def _run_no_more(self, request_ids: Iterable[str]) -> None:
        """They have no part in a step in which all who run decode."""
        ones = dict(self._one_each.num_scheduled_tokens)
        for request_id in request_ids:
            del ones[request_id]
        self._one_each = _new(StepOutcome, (ones, (), {}, {}))

    def _let_decode(self) -> None:
        """Those who have one token to compute are decoders from now on."""
        others, self._others = self._others, []
        for request in others:
            if request.num_computed_tokens + 1 == request.num_tokens:
                self._decode(request)
            else:
                self._others.append(request)

    def _decode(self, request: Request) -> None:
        """A request that has one token to compute is a decoder from now on.

        That is all there is to it until it takes a block, fills one, ends, or may compute no more.
        """
        end = request.finish_at - 2
        until = end if end < self._last_token else self._last_token
        slots = len(request.block_ids) * self._block_size
        if slots - self._lookahead < until and slots < self._max_model_len:
            until = slots - self._lookahead
        if self._caches:
            fills = (request.num_cached_blocks + 1) * self._block_size - 1
            if fills < until:
                until = fills
        self._decoders.join(request, until, ends=until == end)

    def _end(self, request: Request) -> None:
        """A request that ends gives up its blocks and is forgotten."""
        self._free(request)
        self._num_recomputed_tokens += request.num_recomputed_tokens()
        request.running = False
        del self._requests[request.request_id]

    def _free(self, request: Request) -> None:
        """A request gives up all its blocks, the last one first."""
        if request.block_ids:
            self._pool.put_back(request.block_ids[::-1])
            request.block_ids = []
        request.tail = None
        request.num_cached_blocks = 0
