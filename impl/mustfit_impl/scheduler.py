"""The scheduler, to be embedded in a simulator."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from sys import maxsize
from typing import Final, NamedTuple

from mustfit_impl.block_pool import BlockPool, Node
from mustfit_impl.queues import FcfsQueue, PriorityQueue
from mustfit_impl.request import NEVER, HashedRequest, Request, RequestError, request_of
from mustfit_impl.semantics import NEWEST, REVISIONS
from mustfit_spec import Config, FinishReason, NewRequest, SchedulerFailure, StepTrace

#: Stands for "without end", where steps are counted.
FOR_EVER: Final = maxsize


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


class _Refusal(NamedTuple):
    """The last refusal of an admission.

    Attributes:
        request: Who was refused.
        version: The pool's ``releases`` then, if the gate refused, and else its ``changes``.
        limits: Budget and threshold then, if it wasn't the gate.
    """

    request: Request
    version: int
    limits: tuple[int, int] | None


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
        self._refusal: _Refusal | None = None

        # What a step reads, out of the configuration and of the semantics.
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

        # A stride: steps that are known to be equal, and those of them not yet accounted for.
        self._stride = 0
        self._unsettled = 0
        self._striding: list[Request] = []
        self._stride_outcome = StepOutcome({}, (), {}, {})

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
        self._interrupt()
        self._requests[added.request_id] = added
        self._waiting.add(added)

    def abort(self, request_id: str) -> bool:
        """A request ends at once, waiting or running. Whether it was there to be ended.

        Source: vLLM 0.33.0 v1/core/sched/scheduler.py:2979-3029.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._interrupt()
        if request.running:
            self._running.remove(request)
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
        self._interrupt()
        if reset_running_requests:
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

    def advance(self, max_steps: int) -> Run:
        """The next steps, as many as are known to be equal, at least one.

        Args:
            max_steps: How many at most, at least one.

        Raises:
            SchedulerFailure: Where vLLM's own assertions fail. The scheduler is of no use then.
        """
        if max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, not {max_steps}")
        stride = self._stride
        if not stride:
            self._settle()
            stride = self._plan()
            if not stride:
                return Run(self._step(), 1)
        steps = min(stride, max_steps)
        self._stride = stride - steps
        self._unsettled += steps
        return Run(self._stride_outcome, steps)

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
        pool = self._pool
        cached = sorted(
            (block_id, *(node.later or ()))
            for block_id, node in enumerate(pool.node)
            if node is not None and node.block_id == block_id
        )
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

    # --- Strides ------------------------------------------------------------------------------

    def _plan(self) -> int:
        """How many steps from here on are bound to be equal, and make no difference but in tokens.

        That is so while each running request computes one token within its blocks and fills none,
        nobody ends, and nobody can be admitted. 0 if that isn't so, or isn't known.
        """
        budget = self._token_budget
        stride = FOR_EVER
        striding = self._running[:budget]
        for request in striding:
            steps = request.plain_until - request.num_computed_tokens
            if steps < stride:
                if steps <= 0:
                    return 0
                stride = steps
        if (
            self._waiting
            and len(striding) < budget
            and len(self._running) < self._seats
            and not self._is_known_to_be_refused(
                self._waiting.head(),
                budget - len(striding),
                self._threshold(len(self._running) + len(self._waiting)),
            )
        ):
            return 0
        self._striding = striding
        self._stride_outcome = StepOutcome(
            dict.fromkeys([request.request_id for request in striding], 1), (), {}, {}
        )
        return stride

    def _settle(self) -> None:
        """Accounts for the steps of a stride that were taken."""
        steps = self._unsettled
        if steps:
            self._unsettled = 0
            for request in self._striding:
                request.num_computed_tokens += steps
                request.num_tokens += steps

    def _interrupt(self) -> None:
        """Something happens from outside, which ends a stride."""
        self._settle()
        self._stride = 0

    # --- A step -------------------------------------------------------------------------------

    def _step(self) -> StepOutcome:
        running, waiting = self._running, self._waiting
        threshold = self._threshold(len(running) + len(waiting))
        scheduled: dict[Request, int] = {}
        preempted: list[str] = []
        admitted: dict[str, int] = {}
        budget = self._schedule_running(threshold, scheduled, preempted)
        if not preempted:
            while waiting and budget > 0 and len(running) < self._seats:
                request = waiting.head()
                chunk = self._admit(request, budget, threshold)
                if not chunk:
                    break
                admitted[request.request_id] = request.num_computed_tokens
                scheduled[request] = chunk
                budget -= chunk
        if self._semantics.negative_chunks:
            self._assert(scheduled, budget)
        return StepOutcome(
            {request.request_id: tokens for request, tokens in scheduled.items()},
            tuple(preempted),
            admitted,
            self._update_from_output(scheduled),
        )

    def _schedule_running(
        self, threshold: int, scheduled: dict[Request, int], preempted: list[str]
    ) -> int:
        """Schedules those running; who was, and who was preempted for it, is noted.

        Returns:
            What is left of the budget, in tokens.
        """
        running = self._running
        budget = self._token_budget
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            if request.num_computed_tokens < request.plain_until:
                scheduled[request] = 1
                budget -= 1
                index += 1
                continue
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

    def _threshold(self, num_eligible: int) -> int:
        """Most tokens that one request gets in this step."""
        threshold = self.config.long_prefill_token_threshold
        if not threshold:
            return NEVER
        if self._semantics.threshold_spares_a_lone_request:
            if num_eligible <= 1:
                return NEVER
            if self.config.long_prefill_token_threshold_adaptive:
                return max(threshold, self.config.max_num_batched_tokens // num_eligible)
        return threshold

    def _chunk(self, request: Request, budget: int, threshold: int) -> int:
        """Tokens that a running request is to compute."""
        computed = request.num_computed_tokens
        to_model_end = self.config.max_model_len - 1 - computed
        if to_model_end < 0 and not self._semantics.negative_chunks:
            return 0
        return min(request.num_tokens - computed, threshold, budget, to_model_end)

    def _allocate_running(self, request: Request, chunk: int) -> bool:
        """Blocks for a running request's chunk, if they are there."""
        config = self.config
        computed = min(request.num_computed_tokens, config.max_model_len)
        slots = min(computed + chunk + self._lookahead, config.max_model_len)
        count = -(-slots // config.block_size) - len(request.block_ids)
        if count > len(self._pool.free):
            return False
        if count > 0:
            request.block_ids += self._pool.take(count)
        self._cache(request, computed + chunk)
        return True

    def _victim(self) -> int:
        """The place in ``running`` of whom to preempt."""
        running = self._running
        if self.config.policy == "fcfs":
            return len(running) - 1
        return max(range(len(running)), key=lambda place: running[place].priority_key[:2])

    def _preempt(self, place: int) -> None:
        """Whoever has that place in ``running`` gives up all blocks and waits again."""
        request = self._running.pop(place)
        self._free(request)
        request.num_computed_tokens = 0
        request.plain_until = 0
        request.running = False
        self._waiting.requeue(request)

    def _admit(self, request: Request, budget: int, threshold: int) -> int:
        """Admits the head of those who wait, if it fits. With how many tokens; 0 if it doesn't."""
        config, pool = self.config, self._pool
        if self._is_known_to_be_refused(request, budget, threshold):
            return 0
        hit, missing = self._lookup(request)
        hit_tokens = len(hit) * config.block_size
        chunk = min(request.num_tokens - hit_tokens, threshold)
        if chunk > budget:
            if not config.enable_chunked_prefill:
                return 0
            chunk = budget
        ref_cnt = pool.ref_cnt
        num_active = sum(1 for node in hit if ref_cnt[node.block_id])
        free = len(pool.free) - (self._watermark_blocks if self._running else 0)
        if config.scheduler_reserve_full_isl:
            full = min(request.num_tokens, config.max_model_len)
            if max(-(-full // config.block_size), len(hit)) - num_active > free:
                pool.watch(hit, missing)
                self._refusal = _Refusal(request, pool.releases, None)
                return 0
        computed = min(hit_tokens, config.max_model_len)
        slots = min(computed + chunk + self._admission_lookahead, config.max_model_len)
        required = max(-(-slots // config.block_size), len(hit))
        if required - num_active > free:
            self._refusal = _Refusal(request, pool.changes, (budget, threshold))
            return 0
        request.block_ids = pool.touch(hit)
        if required > len(hit):
            request.block_ids += pool.take(required - len(hit))
        request.nodes = hit
        request.num_cached_blocks = len(hit)
        self._cache(request, computed + chunk)
        request.num_computed_tokens = hit_tokens
        request.running = True
        self._waiting.remove(request)
        self._running.append(request)
        return chunk

    def _is_known_to_be_refused(self, request: Request, budget: int, threshold: int) -> bool:
        """Whether it was refused before, and nothing has happened since that could change that.

        Refused by the gate, a request is refused until blocks are released, however few tokens it
        is to compute; refused for its chunk, until anything changes.
        """
        refusal = self._refusal
        if refusal is None or refusal.request is not request:
            return False
        if refusal.limits is None:
            return refusal.version == self._pool.releases
        return refusal.version == self._pool.changes and refusal.limits == (budget, threshold)

    def _lookup(self, request: Request) -> tuple[list[Node], Hashable]:
        """A request's prefix hit, and the content that wasn't found behind it, if one was sought.

        That is ``None`` if everything was found.
        """
        hit: list[Node] = []
        if self.config.enable_prefix_caching:
            content = request.content
            children = self._pool.root.children
            for index in range((request.num_tokens - 1) // self.config.block_size):
                sought = content(index)
                node = children.get(sought)
                if node is None or not node.block_id:
                    return hit, sought
                hit.append(node)
                children = node.children
        return hit, None

    def _cache(self, request: Request, num_tokens: int) -> None:
        """Of a request's blocks, those filled by so many tokens enter the prefix cache."""
        num_full = min(num_tokens, request.num_tokens) // self.config.block_size
        start = request.num_cached_blocks
        if num_full <= start or not self.config.enable_prefix_caching:
            return
        end = min(num_full, len(request.block_ids))
        request.num_cached_blocks = num_full
        if start >= end:
            return
        pool, nodes, content = self._pool, request.nodes, request.content
        while len(nodes) < start:
            nodes.append(pool.child(nodes[-1] if nodes else pool.root, content(len(nodes))))
        parent = nodes[-1] if nodes else pool.root
        nodes += pool.cache(request.block_ids[start:end], parent, map(content, range(start, end)))

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

    def _update_from_output(self, scheduled: Mapping[Request, int]) -> dict[str, FinishReason]:
        """Each request that has computed all its tokens gets one more. Who ended, and why."""
        finished: dict[str, FinishReason] = {}
        for request, tokens in scheduled.items():
            computed = request.num_computed_tokens + tokens
            request.num_computed_tokens = computed
            if computed < request.num_tokens:
                continue
            request.num_tokens += 1
            if request.num_tokens >= request.finish_at:
                finished[request.request_id] = request.finish_reason
                self._end(request)
            elif computed >= request.plain_until:
                request.plain_until = self._plain_until(request)
        if finished:
            self._running = [r for r in self._running if r.running]
        return finished

    def _plain_until(self, request: Request) -> int:
        """Computed tokens at which a request that computes one a step does more than that."""
        config = self.config
        until = min(request.finish_at - 2, config.max_model_len - 1)
        slots = len(request.block_ids) * config.block_size
        if slots < config.max_model_len:
            until = min(until, slots - self._lookahead)
        if config.enable_prefix_caching:
            until = min(until, (request.num_cached_blocks + 1) * config.block_size - 1)
        return until

    def _end(self, request: Request) -> None:
        """A request that ends gives up its blocks and is forgotten."""
        self._free(request)
        request.running = False
        del self._requests[request.request_id]

    def _free(self, request: Request) -> None:
        """A request gives up all its blocks, the last one first."""
        if request.block_ids:
            self._pool.put_back(request.block_ids[::-1])
            request.block_ids = []
        request.nodes = []
        request.num_cached_blocks = 0
