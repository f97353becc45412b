"""Wrong schedulers: each breaks one rule, and shows what a scheduler that does so looks like.

A mutant is a class to be put in front of a revision, so that every mutant exists for every
revision. It overrides the method that carries the rule which it breaks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import attrs

from mustfit_spec import (
    REVISIONS,
    NewRequest,
    Request,
    RequestStatus,
    Scheduler,
    State,
    StepOutcome,
    rules_of,
)
from mustfit_spec.kv_cache_manager import cdiv
from mustfit_spec.scheduler import Step
from mustfit_spec.state import BlockHash
from mustfit_spec.trace import FinishReason

# Overrides keep the signatures of what they override, used or not.
# ruff: noqa: ARG002


@attrs.frozen(kw_only=True)
class Mutant:
    """A wrong scheduler.

    Attributes:
        name: As in ``mutant:NAME``.
        breaks: The ID of the rule it breaks.
        description: What it does instead, in one sentence.
        seen_in: The public issue where a real project did this, if one did.
        part: The class to be put in front of a revision.
        needs: A configuration field without which it isn't wrong, if there is one.
    """

    name: str
    breaks: str
    description: str
    seen_in: str
    part: type[Scheduler]
    needs: str | None = None

    def exists_in(self, revision: str) -> bool:
        """Whether it is wrong in this revision, where its rule may not come into play."""
        scheduler = REVISIONS[revision]
        return self.breaks in rules_of(scheduler) and self.needs not in scheduler.lacks

    def of(self, revision: str) -> type[Scheduler]:
        """The wrong scheduler that is otherwise like this revision."""
        return _combine(self, revision)


@cache
def _combine(wrong: Mutant, revision: str) -> type[Scheduler]:
    return type(wrong.part.__name__, (wrong.part, REVISIONS[revision]), {})


#: All of them, by name.
MUTANTS: dict[str, Mutant] = {}


def mutant(
    name: str, *, breaks: str, seen_in: str = "", needs: str | None = None
) -> Callable[[type[Scheduler]], type[Scheduler]]:
    """Enter a wrong scheduler; the first line of its docstring describes it."""

    def enter(part: type[Scheduler]) -> type[Scheduler]:
        description = " ".join((part.__doc__ or "").split())
        MUTANTS[name] = Mutant(
            name=name,
            breaks=breaks,
            description=description,
            seen_in=seen_in,
            part=part,
            needs=needs,
        )
        return part

    return enter


# --- Allocation -------------------------------------------------------------------------------


@mutant("gate-ignored", breaks="ALLOC-GATE")
class _GateIgnored(Scheduler):
    """The gate always says yes; only the chunk has to fit."""

    def full_sequence_fits(
        self, state: State, request: Request, new_computed_blocks: tuple[int, ...], watermark: int
    ) -> bool:
        return True


@mutant("gate-one-block-spare", breaks="ALLOC-GATE")
class _GateSpare(Scheduler):
    """The gate wants one block more than the sequence needs."""

    def full_sequence_fits(
        self, state: State, request: Request, new_computed_blocks: tuple[int, ...], watermark: int
    ) -> bool:
        return super().full_sequence_fits(state, request, new_computed_blocks, watermark + 1)


@mutant("gate-on-prompt", breaks="ALLOC-GATE-LENGTH", seen_in="vllm-ascend 11334")
class _GateOnPrompt(Scheduler):
    """The gate counts the prompt, also for a resumed request that has output."""

    def full_num_tokens(self, request: Request) -> int:
        return min(len(request.given.prompt_token_ids), self.config.max_model_len)


@mutant("gate-beyond-model-length", breaks="ALLOC-GATE-LENGTH")
class _GateBeyondModelLength(Scheduler):
    """The gate counts all tokens, beyond ``max_model_len`` as well."""

    def full_num_tokens(self, request: Request) -> int:
        return request.num_tokens


@mutant("gate-with-output-to-come", breaks="ALLOC-GATE-LENGTH")
class _GateWithOutput(Scheduler):
    """The gate counts the output still to come, as far as it is limited."""

    def full_num_tokens(self, request: Request) -> int:
        whole = len(request.given.prompt_token_ids) + request.given.output_limit
        return min(whole, self.config.max_model_len)


@mutant("new-blocks-only", breaks="ALLOC-INACTIVE-HIT", seen_in="dynamo 9721")
class _NewBlocksOnly(Scheduler):
    """A hit on an inactive cached block is taken to cost nothing."""

    def get_num_evictable_blocks(self, state: State, new_computed_blocks: tuple[int, ...]) -> int:
        return 0


@mutant("active-hits-cost", breaks="ALLOC-INACTIVE-HIT")
class _ActiveHitsCost(Scheduler):
    """A hit on an active block is taken to cost a free block too."""

    def get_num_evictable_blocks(self, state: State, new_computed_blocks: tuple[int, ...]) -> int:
        return len(new_computed_blocks)


@mutant("hits-not-deducted", breaks="ALLOC-COUNT")
class _HitsNotDeducted(Scheduler):
    """The blocks that a request hits are counted as new ones too."""

    def get_num_blocks_to_allocate(
        self, state: State, request: Request, num_tokens: int, new_computed_blocks: tuple[int, ...]
    ) -> int:
        num_new = max(cdiv(num_tokens, self.config.block_size) - len(request.block_ids), 0)
        return num_new + self.get_num_evictable_blocks(state, new_computed_blocks)


@mutant("chunk-one-block-spare", breaks="ALLOC-CHUNK")
class _ChunkSpare(Scheduler):
    """The chunk's check wants one block more than the chunk needs."""

    def chunk_fits(
        self,
        state: State,
        request: Request,
        num_tokens_need_slot: int,
        new_computed_blocks: tuple[int, ...],
        watermark: int,
    ) -> bool:
        return super().chunk_fits(
            state, request, num_tokens_need_slot, new_computed_blocks, watermark + 1
        )


@mutant("slots-beyond-model-length", breaks="ALLOC-SLOTS")
class _SlotsBeyondModelLength(Scheduler):
    """Slots are taken beyond ``max_model_len``."""

    def num_tokens_need_slot(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int,
        num_lookahead_tokens: int,
    ) -> int:
        computed = request.num_computed_tokens + num_new_computed_tokens
        return computed + num_new_tokens + num_lookahead_tokens


@mutant("no-lookahead", breaks="ALLOC-SLOTS")
class _NoLookahead(Scheduler):
    """Lookahead slots are never taken."""

    def num_tokens_need_slot(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int,
        num_lookahead_tokens: int,
    ) -> int:
        return super().num_tokens_need_slot(request, num_new_tokens, num_new_computed_tokens, 0)


@mutant("watermark-ignored", breaks="ALLOC-WATERMARK", needs="watermark")
class _WatermarkIgnored(Scheduler):
    """Admission ignores the watermark."""

    def watermark_blocks(self, request: Request, *, has_scheduled_reqs: bool) -> int:
        return 0


@mutant("watermark-always", breaks="ALLOC-WATERMARK", needs="watermark")
class _WatermarkAlways(Scheduler):
    """The watermark is kept free from running requests too, and when nobody runs."""

    def watermark_blocks(self, request: Request, *, has_scheduled_reqs: bool) -> int:
        return int(self.config.watermark * self.config.num_gpu_blocks)


@mutant("one-block-reserve", breaks="ALLOC-WATERMARK")
class _OneBlockReserve(Scheduler):
    """One block is kept free whenever somebody is admitted beside others."""

    def watermark_blocks(self, request: Request, *, has_scheduled_reqs: bool) -> int:
        kept = super().watermark_blocks(request, has_scheduled_reqs=has_scheduled_reqs)
        waiting = request.status is not RequestStatus.RUNNING
        return kept + int(waiting and has_scheduled_reqs)


@mutant("partial-allocation", breaks="ALLOC-REFUSE")
class _PartialAllocation(Scheduler):
    """A chunk that doesn't fit gets what slots there are."""

    def allocate_slots(
        self,
        state: State,
        request: Request,
        num_new_tokens: int,
        *,
        new_computed_blocks: tuple[int, ...] = (),
        num_lookahead_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        has_scheduled_reqs: bool = True,
    ) -> State | None:
        for fewer in range(num_new_tokens, 0, -1):
            after = super().allocate_slots(
                state,
                request,
                fewer,
                new_computed_blocks=new_computed_blocks,
                num_lookahead_tokens=num_lookahead_tokens,
                full_sequence_must_fit=full_sequence_must_fit,
                has_scheduled_reqs=has_scheduled_reqs,
            )
            if after is not None:
                return after
        return None


@mutant("new-blocks-before-hits", breaks="ALLOC-TAKE")
class _NewBlocksBeforeHits(Scheduler):
    """New blocks are taken before the hit ones are held, and may be these."""

    def take_blocks(
        self, state: State, request: Request, num_slots: int, new_computed_blocks: tuple[int, ...]
    ) -> State:
        held = request.block_ids + new_computed_blocks
        num_new = max(cdiv(num_slots, self.config.block_size) - len(held), 0)
        state, new_blocks = self.get_new_blocks(state, num_new)
        state = self.touch(state, new_computed_blocks)
        return state.with_request(
            attrs.evolve(
                request,
                block_ids=held + new_blocks,
                num_cached_blocks=request.num_cached_blocks + len(new_computed_blocks),
            )
        )


@mutant("blocks-from-tail", breaks="ALLOC-HEAD")
class _BlocksFromTail(Scheduler):
    """New blocks come from the tail of the free queue."""

    def get_new_blocks(self, state: State, num_blocks: int) -> tuple[State, tuple[int, ...]]:
        queue = state.free_block_queue[::-1]
        state = attrs.evolve(state, free_block_queue=queue)
        state, taken = super().get_new_blocks(state, num_blocks)
        return attrs.evolve(state, free_block_queue=state.free_block_queue[::-1]), taken


@mutant("free-uncaches", breaks="ALLOC-FREE")
class _FreeUncaches(Scheduler):
    """A block that nobody holds any more leaves the prefix cache."""

    def free(self, state: State, request: Request) -> State:
        state = super().free(state, request)
        for block_id in request.block_ids:
            if state.blocks[block_id].ref_cnt == 0:
                state = self.evict(state, block_id)
        return state


@mutant("free-head-first", breaks="ALLOC-FREE-ORDER")
class _FreeHeadFirst(Scheduler):
    """Of one request's blocks the first is reused first."""

    def put_back(self, state: State, block_ids: tuple[int, ...]) -> State:
        return super().put_back(state, block_ids[::-1])


# --- The prefix cache -------------------------------------------------------------------------


@mutant("hash-without-prefix", breaks="CACHE-HASH")
class _HashWithoutPrefix(Scheduler):
    """Two blocks count as equal if their own tokens are, whatever comes before."""

    def block_hash(self, request: Request, index: int) -> BlockHash:
        size = self.config.block_size
        return request.all_token_ids[index * size : (index + 1) * size]


@mutant("last-duplicate-found", breaks="CACHE-FIRST")
class _LastDuplicateFound(Scheduler):
    """Of several cached blocks with equal content, a lookup finds the one cached last."""

    def get_cached_block(self, state: State, block_hash: BlockHash) -> int | None:
        newest_first = attrs.evolve(state, cached_block_ids=state.cached_block_ids[::-1])
        return super().get_cached_block(newest_first, block_hash)


@mutant("output-not-cached", breaks="CACHE-FULL")
class _OutputNotCached(Scheduler):
    """Blocks that hold output never enter the cache."""

    def cache_full_blocks(self, state: State, request: Request, num_tokens: int) -> State:
        return super().cache_full_blocks(
            state, request, min(num_tokens, len(request.given.prompt_token_ids))
        )


@mutant("partial-blocks-cached", breaks="CACHE-FULL")
class _PartialBlocksCached(Scheduler):
    """A partly filled block enters the cache, and counts as cached from then on."""

    def cache_full_blocks(self, state: State, request: Request, num_tokens: int) -> State:
        size = self.config.block_size
        return super().cache_full_blocks(state, request, cdiv(num_tokens, size) * size)


@mutant("duplicate-replaces", breaks="CACHE-DUPLICATE")
class _DuplicateReplaces(Scheduler):
    """A second block of equal content replaces the first in the cache."""

    def cache_block(self, state: State, block_id: int, block_hash: BlockHash) -> State:
        for other in state.cached_block_ids:
            if state.blocks[other].block_hash == block_hash:
                state = self.evict(state, other)
        return super().cache_block(state, block_id, block_hash)


@mutant("duplicate-not-cached", breaks="CACHE-DUPLICATE")
class _DuplicateNotCached(Scheduler):
    """A second block of equal content doesn't enter the cache."""

    def cache_block(self, state: State, block_id: int, block_hash: BlockHash) -> State:
        if any(state.blocks[b].block_hash == block_hash for b in state.cached_block_ids):
            return state
        return super().cache_block(state, block_id, block_hash)


@mutant("stale-blocks-stay-cached", breaks="CACHE-EVICT")
class _StaleBlocksStayCached(Scheduler):
    """A block stays in the cache until it is filled with other content."""

    def evict(self, state: State, block_id: int) -> State:
        return state

    def cache_block(self, state: State, block_id: int, block_hash: BlockHash) -> State:
        return super().cache_block(super().evict(state, block_id), block_id, block_hash)


@mutant("hit-stays-in-queue", breaks="CACHE-TOUCH")
class _HitStaysInQueue(Scheduler):
    """An inactive block that is hit moves to the tail of the free queue instead of leaving it."""

    def touch(self, state: State, block_ids: tuple[int, ...]) -> State:  # type: ignore[override]
        inactive = tuple(b for b in block_ids if b in state.free_block_queue)
        state = super().touch(state, block_ids)
        return attrs.evolve(state, free_block_queue=state.free_block_queue + inactive)


@mutant("reset-always", breaks="CACHE-RESET")
class _ResetAlways(Scheduler):
    """A reset empties the cache though blocks are held."""

    def reset(self, state: State) -> State:
        for block_id in state.cached_block_ids:
            state = self.evict(state, block_id)
        return state


@mutant("reset-never", breaks="CACHE-RESET")
class _ResetNever(Scheduler):
    """A reset does nothing."""

    def reset(self, state: State) -> State:
        return state


@mutant("hits-active-only", breaks="CACHE-LOOKUP")
class _HitsActiveOnly(Scheduler):
    """A lookup finds only blocks that somebody holds."""

    def get_computed_blocks(self, state: State, request: Request) -> tuple[int, ...]:
        hit = super().get_computed_blocks(state, request)
        inactive = [i for i, block_id in enumerate(hit) if state.blocks[block_id].ref_cnt == 0]
        return hit[: inactive[0]] if inactive else hit


@mutant("last-token-from-cache", breaks="CACHE-LAST-TOKEN")
class _LastTokenFromCache(Scheduler):
    """A sequence that is cached whole is hit whole."""

    def max_cache_hit_length(self, request: Request) -> int:
        return request.num_tokens


@mutant("cached-after-output", breaks="CACHE-AT-ALLOCATION")
class _CachedAfterOutput(Scheduler):
    """Blocks enter the cache once the step that fills them is over."""

    def cache_at_allocation(self, state: State, request: Request, num_tokens: int) -> State:
        return state

    def advance(self, state: State, outcome: StepOutcome) -> State:
        state = super().advance(state, outcome)
        for request_id, _ in outcome.num_scheduled_tokens:
            request = state.request(request_id)
            num_tokens = min(request.num_computed_tokens, request.num_tokens)
            state = self.cache_full_blocks(state, request, num_tokens)
        return state


@mutant("lookahead-cached", breaks="CACHE-AT-ALLOCATION")
class _LookaheadCached(Scheduler):
    """A block whose last slots are only looked ahead to is cached as if it were full."""

    def cache_at_allocation(self, state: State, request: Request, num_tokens: int) -> State:
        num_slots = len(request.block_ids) * self.config.block_size
        looked_ahead = min(num_tokens + self.config.num_lookahead_tokens, num_slots)
        return self.cache_full_blocks(state, request, looked_ahead)


@mutant("prefix-caching-ignored", breaks="CACHE-LOOKUP")
class _PrefixCachingIgnored(Scheduler):
    """Nothing is ever cached or hit."""

    def get_computed_blocks(self, state: State, request: Request) -> tuple[int, ...]:
        return ()

    def cache_at_allocation(self, state: State, request: Request, num_tokens: int) -> State:
        return state


@mutant("policy-ignored", breaks="WAIT-ORDER")
class _PolicyIgnored(Scheduler):
    """Priorities are ignored: everybody is served, and preempted, first come, first served."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        object.__setattr__(self, "config", attrs.evolve(self.config, policy="fcfs"))

    def enqueue(self, state: State, request: Request) -> State:
        return attrs.evolve(state, waiting=(*state.waiting, request.request_id))


# --- The step ---------------------------------------------------------------------------------


@mutant("waiting-before-running", breaks="STEP-ORDER")
class _WaitingBeforeRunning(Scheduler):
    """Waiting requests are admitted before running ones are scheduled."""

    def schedule(self, state: State) -> tuple[State, StepOutcome]:
        step = Step(
            state=state,
            token_budget=self.token_budget(),
            long_prefill_token_threshold=self.long_prefill_token_threshold(state),
        )
        ran = len(state.running)
        step = self.schedule_waiting(step)
        admitted = step.state.running[ran:]
        kept = attrs.evolve(step.state, running=step.state.running[:ran])
        step = self.schedule_running(attrs.evolve(step, state=kept))
        state = attrs.evolve(step.state, running=step.state.running + admitted)
        outcome = StepOutcome(
            num_scheduled_tokens=step.num_scheduled_tokens,
            preempted=step.preempted,
            num_cached_tokens=step.num_cached_tokens,
        )
        return self.advance(state, outcome), outcome


@mutant("second-budget-ignored", breaks="STEP-BUDGET")
class _SecondBudgetIgnored(Scheduler):
    """``max_num_scheduled_tokens`` is ignored."""

    def token_budget(self) -> int:
        return self.config.max_num_batched_tokens


@mutant("threshold-ignored", breaks="STEP-THRESHOLD")
class _ThresholdIgnored(Scheduler):
    """``long_prefill_token_threshold`` is ignored."""

    def long_prefill_token_threshold(self, state: State) -> int:
        return 0


@mutant("counted-when-output-is-in", breaks="STEP-ADVANCE")
class _CountedLate(Scheduler):
    """The last token of a chunk that doesn't end the prompt isn't counted as computed."""

    def advance(self, state: State, outcome: StepOutcome) -> State:
        state = super().advance(state, outcome)
        for request_id, num_tokens in outcome.num_scheduled_tokens:
            request = state.request(request_id)
            if num_tokens > 1 and request.num_computed_tokens < request.num_tokens:
                computed = request.num_computed_tokens - 1
                state = state.with_request(attrs.evolve(request, num_computed_tokens=computed))
        return state


@mutant("freed-in-reverse", breaks="STEP-OUTPUT")
class _FreedInReverse(Scheduler):
    """Requests that end in one step are freed in the reverse order."""

    def update_from_output(self, state: State, outcome: StepOutcome) -> tuple[State, StepOutcome]:
        backwards = attrs.evolve(outcome, num_scheduled_tokens=outcome.num_scheduled_tokens[::-1])
        state, after = super().update_from_output(state, backwards)
        return state, attrs.evolve(after, num_scheduled_tokens=outcome.num_scheduled_tokens)


@mutant("negative-chunks-pass", breaks="STEP-ASSERT")
class _NegativeChunksPass(Scheduler):
    """A step that scheduled a negative number of tokens, or too many, goes on."""

    def assert_scheduled(self, outcome: StepOutcome) -> None:
        return


@mutant("one-token-too-long", breaks="STEP-STOP")
class _OneTokenTooLong(Scheduler):
    """A request ends one token after ``max_model_len``."""

    def finish_reason_past_minimum(self, request: Request) -> FinishReason | None:
        reason = super().finish_reason_past_minimum(request)
        at_limit = request.num_output_tokens >= request.given.output_limit
        at_end = request.num_tokens == self.config.max_model_len
        return None if reason == "length" and at_end and not at_limit else reason


@mutant("stop-tokens-ignored", breaks="STEP-STOP")
class _StopTokensIgnored(Scheduler):
    """``stop_token_ids`` are ignored."""

    def finish_reason_past_minimum(self, request: Request) -> FinishReason | None:
        given = attrs.evolve(request.given, stop_token_ids=())
        return super().finish_reason_past_minimum(attrs.evolve(request, given=given))


@mutant("min-tokens-other-way", breaks="STEP-STOP")
class _MinTokensOtherWay(Scheduler):
    """``min_tokens`` holds off every end where this revision doesn't, and the other way round."""

    def finish_reason(self, request: Request) -> FinishReason | None:
        reason = self.finish_reason_past_minimum(request)
        too_few = request.num_output_tokens < request.given.min_tokens
        if not too_few:
            return reason
        return None if super().finish_reason(request) == reason else reason


@mutant("finished-leak-a-block", breaks="STEP-FINISH", seen_in="inference-sim 1061")
class _FinishedLeakABlock(Scheduler):
    """A request that ends with several blocks doesn't give up its last one."""

    def finish(self, state: State, request_id: str) -> State:
        request = state.request(request_id)
        state = super().finish(state, request_id)
        if len(request.block_ids) < 2 or request.block_ids[-1] not in state.free_block_queue:  # noqa: PLR2004
            return state
        queue = tuple(b for b in state.free_block_queue if b != request.block_ids[-1])
        return attrs.evolve(state, free_block_queue=queue)


@mutant("abort-running-only", breaks="STEP-ABORT")
class _AbortRunningOnly(Scheduler):
    """Aborting a request that waits does nothing."""

    def abort(self, state: State, request_id: str) -> State:
        return super().abort(state, request_id) if request_id in state.running else state


@mutant("reset-preempts-first-first", breaks="STEP-RESET")
class _ResetFirstFirst(Scheduler):
    """A reset preempts running requests the first first, which reverses their order."""

    def reset_prefix_cache(self, state: State, *, reset_running_requests: bool = False) -> State:
        if reset_running_requests:
            for request_id in state.running:
                state = self.preempt(state, request_id)
        return self.reset(state)


@mutant("reset-spares-running", breaks="STEP-RESET")
class _ResetSparesRunning(Scheduler):
    """A reset never preempts anybody."""

    def reset_prefix_cache(self, state: State, *, reset_running_requests: bool = False) -> State:
        return self.reset(state)


# --- The running loop -------------------------------------------------------------------------


@mutant("decodes-first", breaks="RUN-ORDER")
class _DecodesFirst(Scheduler):
    """Running requests with one token to compute are scheduled before the others."""

    def schedule_running(self, step: Step) -> Step:
        def left(request_id: str) -> bool:
            request = step.state.request(request_id)
            return request.num_tokens - request.num_computed_tokens > 1

        order = tuple(sorted(step.state.running, key=left))
        after = super().schedule_running(
            attrs.evolve(step, state=attrs.evolve(step.state, running=order))
        )
        kept = tuple(r for r in step.state.running if r in after.state.running)
        return attrs.evolve(after, state=attrs.evolve(after.state, running=kept))


@mutant("running-uncapped", breaks="RUN-TOKENS")
class _RunningUncapped(Scheduler):
    """The threshold applies to waiting requests only."""

    def num_new_tokens_of_running(self, step: Step, request: Request) -> int:
        return super().num_new_tokens_of_running(
            attrs.evolve(step, long_prefill_token_threshold=0), request
        )


@mutant("last-position-computed", breaks="RUN-MODEL-LEN")
class _LastPositionComputed(Scheduler):
    """A running request may compute its ``max_model_len``-th token."""

    def tokens_to_model_end(self, request: Request) -> int:
        return super().tokens_to_model_end(request) + 1


@mutant("nothing-to-do-ends-loop", breaks="RUN-PASS-OVER")
class _NothingToDoEndsLoop(Scheduler):
    """A running request with nothing to compute ends the running loop."""

    def pass_over(self, step: Step) -> Step:
        return attrs.evolve(step, req_index=len(step.state.running))


@mutant("one-victim-at-most", breaks="RUN-PREEMPT")
class _OneVictimAtMost(Scheduler):
    """A running request preempts one other; if its chunk still doesn't fit, itself."""

    def make_room(self, step: Step, request: Request, num_new_tokens: int) -> Step:
        before = len(step.preempted)
        while (state := self.allocate_for_running(step.state, request, num_new_tokens)) is None:
            again = len(step.preempted) > before
            victim = request.request_id if again else self.victim(step.state)
            step = self.preempt_in_step(step, victim)
            if victim == request.request_id:
                return step
        step = attrs.evolve(step, state=state, req_index=step.req_index + 1)
        return step.scheduled(request.request_id, num_new_tokens)


@mutant("running-gated", breaks="RUN-NO-GATE")
class _RunningGated(Scheduler):
    """The gate applies to running requests too."""

    def allocate_for_running(
        self, state: State, request: Request, num_new_tokens: int
    ) -> State | None:
        return self.allocate_slots(
            state,
            request,
            num_new_tokens,
            num_lookahead_tokens=self.config.num_lookahead_tokens,
            full_sequence_must_fit=self.config.scheduler_reserve_full_isl,
        )


# --- Preemption -------------------------------------------------------------------------------


@mutant("oldest-first", breaks="PREEMPT-VICTIM")
class _OldestFirst(Scheduler):
    """The victim is the first of ``running``."""

    def victim(self, state: State) -> str:
        return state.running[0] if self.config.policy == "fcfs" else super().victim(state)


@mutant("best-priority-first", breaks="PREEMPT-VICTIM", seen_in="inference-sim 1086")
class _BestPriorityFirst(Scheduler):
    """By priority, the victim is the one that should be served first."""

    def victim(self, state: State) -> str:
        if self.config.policy == "fcfs":
            return super().victim(state)
        return min(state.running, key=lambda r: self.priority_key(state.request(r))[:2])


@mutant("last-of-equals", breaks="PREEMPT-VICTIM")
class _LastOfEquals(Scheduler):
    """Of several equally large in priority and arrival, the victim is the last in ``running``."""

    def victim(self, state: State) -> str:
        return (
            super().victim(attrs.evolve(state, running=state.running[::-1]))
            if (self.config.policy == "priority")
            else super().victim(state)
        )


@mutant("no-refund", breaks="PREEMPT-REFUND", seen_in="vllm 23347")
class _NoRefund(Scheduler):
    """A victim that was scheduled in this step doesn't give its tokens back to the budget."""

    def preempt_in_step(self, step: Step, victim: str) -> Step:
        return attrs.evolve(super().preempt_in_step(step, victim), token_budget=step.token_budget)


@mutant("index-not-moved", breaks="PREEMPT-INDEX", seen_in="vllm 49097")
class _IndexNotMoved(Scheduler):
    """A victim that stood before the one considered costs somebody their turn."""

    def req_index_after(self, step: Step, victim: str) -> int:
        return step.req_index


@mutant("self-preemption-other-way", breaks="PREEMPT-SELF")
class _SelfPreemptionOtherWay(Scheduler):
    """By priority, self-preemption ends the running loop where it doesn't, and vice versa."""

    def self_preemption_ends_loop(self) -> bool:
        ends = super().self_preemption_ends_loop()
        return ends if self.config.policy == "fcfs" else not ends


@mutant("output-forgotten", breaks="PREEMPT-FREE")
class _OutputForgotten(Scheduler):
    """A preempted request loses its output and starts over."""

    def preempt(self, state: State, victim: str) -> State:
        return super().preempt(
            state.with_request(attrs.evolve(state.request(victim), num_output_tokens=0)), victim
        )


@mutant("requeued-at-tail", breaks="PREEMPT-REQUEUE")
class _RequeuedAtTail(Scheduler):
    """A preempted request goes to the tail of ``waiting``."""

    def requeue(self, state: State, request: Request) -> State:
        return attrs.evolve(state, waiting=(*state.waiting, request.request_id))


# --- The waiting loop -------------------------------------------------------------------------


@mutant("admission-after-preemption", breaks="WAIT-AFTER-PREEMPT")
class _AdmissionAfterPreemption(Scheduler):
    """Requests are admitted in a step that preempted somebody."""

    def preemption_bars_admission(self, step: Step) -> bool:
        return False


@mutant("blocked-skipped", breaks="WAIT-LOOP")
class _BlockedSkipped(Scheduler):
    """A request that can't be admitted is skipped, and those behind it are tried."""

    def schedule_waiting(self, step: Step) -> Step:
        skipped: tuple[str, ...] = ()
        while step.state.waiting and step.token_budget > 0 and self.has_free_seat(step.state):
            head = step.state.waiting[0]
            admitted = self.try_to_admit(step, step.state.request(head))
            if admitted is not None:
                step = admitted
                continue
            skipped = (*skipped, head)
            rest = attrs.evolve(step.state, waiting=step.state.waiting[1:])
            step = attrs.evolve(step, state=rest)
        waiting = skipped + step.state.waiting
        return attrs.evolve(step, state=attrs.evolve(step.state, waiting=waiting))


@mutant("admission-preempts", breaks="WAIT-BLOCKED", seen_in="dynamo 9718")
class _AdmissionPreempts(Scheduler):
    """For a head that can't be admitted, running requests are preempted until it can."""

    def blocked(self, step: Step, head: Request) -> Step:
        ran_before = [r for r in step.state.running if r not in dict(step.num_scheduled_tokens)]
        while ran_before or step.num_scheduled_tokens:
            others = [r for r in step.state.running if r != head.request_id]
            if not others:
                return step
            victim = self.victim(attrs.evolve(step.state, running=tuple(others)))
            step = self.preempt_in_step(step, victim)
            # The victim must not stand before the one it made room for.
            waiting = (
                head.request_id,
                *(r for r in step.state.waiting if r != head.request_id),
            )
            step = attrs.evolve(step, state=attrs.evolve(step.state, waiting=waiting))
            admitted = self.try_to_admit(step, step.state.request(head.request_id))
            if admitted is not None:
                return admitted
        return step


@mutant("blocked-to-tail", breaks="WAIT-BLOCKED")
class _BlockedToTail(Scheduler):
    """A head that can't be admitted goes to the tail of ``waiting``."""

    def blocked(self, step: Step, head: Request) -> Step:
        waiting = (*step.state.waiting[1:], head.request_id)
        return attrs.evolve(step, state=attrs.evolve(step.state, waiting=waiting))


@mutant("blocked-keeps-blocks", breaks="WAIT-BLOCKED", seen_in="dynamo 11016")
class _BlockedKeepsBlocks(Scheduler):
    """A head that can't be admitted keeps the free blocks that it could get."""

    def blocked(self, step: Step, head: Request) -> Step:
        needed = cdiv(head.num_tokens, self.config.block_size) - len(head.block_ids)
        num_blocks = max(min(step.state.num_free_blocks, needed), 0)
        state, taken = self.get_new_blocks(step.state, num_blocks)
        kept = attrs.evolve(head, block_ids=head.block_ids + taken)
        return attrs.evolve(step, state=state.with_request(kept))


@mutant("too-large-rejected", breaks="WAIT-BLOCKED", seen_in="dynamo 10439")
class _TooLargeRejected(Scheduler):
    """A head that can never fit the pool is dropped."""

    def blocked(self, step: Step, head: Request) -> Step:
        needed = cdiv(self.full_num_tokens(head), self.config.block_size)
        if needed < self.config.num_gpu_blocks:
            return step
        return attrs.evolve(step, state=self.finish(step.state, head.request_id))


@mutant("one-seat-fewer", breaks="WAIT-SEATS")
class _OneSeatFewer(Scheduler):
    """Admission leads to at most one request fewer than allowed, but for the first."""

    def has_free_seat(self, state: State) -> bool:
        if not state.running:
            return True
        one_more = attrs.evolve(state, running=(*state.running, state.running[0]))
        return super().has_free_seat(one_more)


@mutant("gate-always", breaks="WAIT-GATE")
class _GateAlways(Scheduler):
    """The gate applies with ``scheduler_reserve_full_isl`` off as well."""

    def try_to_admit(self, step: Step, request: Request) -> Step | None:
        computed = self.get_computed_blocks(step.state, request)
        has_scheduled_reqs = bool(step.state.running)
        kept = self.watermark_blocks(request, has_scheduled_reqs=has_scheduled_reqs)
        if not self.full_sequence_fits(step.state, request, computed, kept):
            return None
        return super().try_to_admit(step, request)


@mutant("output-not-recomputed", breaks="WAIT-TOKENS")
class _OutputNotRecomputed(Scheduler):
    """A resumed request computes its prompt again, and its output only after that."""

    def num_new_tokens_of_waiting(
        self, step: Step, request: Request, num_computed_tokens: int
    ) -> int | None:
        num_new_tokens = super().num_new_tokens_of_waiting(step, request, num_computed_tokens)
        prompt_left = len(request.given.prompt_token_ids) - num_computed_tokens
        if num_new_tokens is None or prompt_left <= 0:
            return num_new_tokens
        return min(num_new_tokens, prompt_left)


@mutant("always-chunked", breaks="WAIT-CHUNKED")
class _AlwaysChunked(Scheduler):
    """Without chunked prefill too, a request starts with what is left of the budget."""

    def would_be_chunked(self, step: Step, num_new_tokens: int) -> bool:
        return False


@mutant("lookahead-other-way", breaks="WAIT-LOOKAHEAD")
class _LookaheadOtherWay(Scheduler):
    """An admission takes lookahead slots where it doesn't, and the other way round."""

    def lookahead_of_waiting(self) -> int:
        return self.config.num_lookahead_tokens - super().lookahead_of_waiting()


@mutant("admitted-to-head", breaks="WAIT-ADMIT")
class _AdmittedToHead(Scheduler):
    """An admitted request becomes the first of ``running``."""

    def admit(self, state: State, request_id: str, num_computed_tokens: int) -> State:
        state = super().admit(state, request_id, num_computed_tokens)
        return attrs.evolve(state, running=(request_id, *state.running[:-1]))


@mutant("last-in-first-out", breaks="WAIT-ORDER")
class _LastInFirstOut(Scheduler):
    """A new request waits before all others."""

    def enqueue(self, state: State, request: Request) -> State:
        if self.config.policy == "priority":
            return super().enqueue(state, request)
        return attrs.evolve(state, waiting=(request.request_id, *state.waiting))


@mutant("largest-priority-first", breaks="WAIT-ORDER")
class _LargestPriorityFirst(Scheduler):
    """By priority, the largest is served first."""

    def enqueue(self, state: State, request: Request) -> State:
        if self.config.policy == "fcfs":
            return super().enqueue(state, request)

        def key(request_id: str) -> tuple[int, int, str]:
            given: NewRequest = state.request(request_id).given
            return (-given.priority, given.arrival_time, request_id)

        everybody = (*state.waiting, request.request_id)
        return attrs.evolve(state, waiting=tuple(sorted(everybody, key=key)))


@mutant("arrival-ignored", breaks="WAIT-ORDER")
class _ArrivalIgnored(Scheduler):
    """By priority, equals are served in the order they were added, whatever their arrival."""

    def enqueue(self, state: State, request: Request) -> State:
        if self.config.policy == "fcfs":
            return super().enqueue(state, request)

        def key(request_id: str) -> int:
            return state.request(request_id).given.priority

        everybody = (*state.waiting, request.request_id)
        return attrs.evolve(state, waiting=tuple(sorted(everybody, key=key)))
