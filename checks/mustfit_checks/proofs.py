"""What is proved: each check in words, with its scope, and as a program that the shipped code runs.

A check goes through cases; in each, numbers are symbolic, and what it shows is shown for all of
them (``symbolic.py``). It is worth something if what it speaks of can happen, which its witnesses
say, and if wrong schedulers are refuted by it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

import mustfit_spec.block_pool
import mustfit_spec.kv_cache_manager
import mustfit_spec.revisions
import mustfit_spec.scenario
import mustfit_spec.scheduler
import mustfit_spec.state
from mustfit_checks import mutants
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.symbolic import (
    Covered,
    Refuted,
    Unknown,
    assume,
    every_path,
    integer,
    least,
    symbolic_builtins,
)
from mustfit_spec import Config, NewRequest, Request, Scheduler, State
from mustfit_spec.state import KVCacheBlock

#: Modules whose functions are run on symbolic values.
MODULES = (
    mustfit_spec.scenario,
    mustfit_spec.state,
    mustfit_spec.block_pool,
    mustfit_spec.kv_cache_manager,
    mustfit_spec.scheduler,
    mustfit_spec.revisions,
    mutants,
)

#: A case: symbolic values are made, the scheduler runs on them, and something is shown.
Program = Callable[[], None]

#: All cases of a check, for a scheduler's class.
Cases = Callable[[type[Scheduler]], Iterator[Program]]


@attrs.frozen(kw_only=True)
class Check:
    """Something that is proved.

    Attributes:
        name: What it is called.
        statement: What holds, in words.
        rules: The IDs of the rules that it is about.
        scope: What it was shown for, in words.
        cases: The cases, of a scheduler's class.
        happens: What has to be able to happen, or it would speak of nothing.
    """

    name: str
    statement: str
    rules: tuple[str, ...]
    scope: str
    cases: Cases
    happens: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Result:
    """What came of a check.

    Attributes:
        result: ``proved``, ``refuted`` or ``unknown``.
        reason: What doesn't hold, and for which values; or why it isn't known.
        seconds: How long it took.
        covered: What was covered.
    """

    result: str
    reason: str | None
    seconds: float
    covered: Covered


def prove(check: Check, scheduler: type[Scheduler]) -> Result:
    """Goes through all cases of a check, of one scheduler."""
    covered = Covered()
    began = time.monotonic()
    result, reason = "proved", None
    try:
        with symbolic_builtins(MODULES):
            for program in check.cases(scheduler):
                every_path(program, covered)
    except Refuted as error:
        result, reason = "refuted", str(error)
    except Unknown as error:
        result, reason = "unknown", str(error)
    except Exception as error:  # noqa: BLE001 - of a wrong scheduler, or of what isn't symbolic
        result, reason = "unknown", f"it breaks: {error!r}"
    else:
        never = [what for what in check.happens if what not in covered.witnesses]
        if never:
            result, reason = "unknown", f"it never happens that {', '.join(never)}"
    return Result(
        result=result,
        reason=reason,
        seconds=time.monotonic() - began,
        covered=covered,
    )


def tried_on(check: Check, revision: str) -> list[str]:
    """The wrong schedulers that break a rule of a check."""
    return [m.name for m in MUTANTS.values() if m.breaks in check.rules and m.exists_in(revision)]


# --- Symbolic states --------------------------------------------------------------------------


@attrs.frozen
class Counted:
    """Stands for a sequence of which only the length matters.

    Attributes:
        symbolic_length: Its length.
    """

    symbolic_length: Any


def made(cls: type[Any], **fields: Any) -> Any:
    """An object of the specification with symbolic fields; its limits are the caller's to assume.

    Fields that aren't given have their defaults.
    """
    one = object.__new__(cls)
    for field in attrs.fields(cls):
        if field.name in fields:
            value = fields[field.name]
        else:
            factory = getattr(field.default, "factory", None)
            value = field.default if factory is None else factory()
        object.__setattr__(one, field.name, value)
    return one


class Share:
    """A watermark, of which only the number of blocks matters.

    Args:
        blocks: The blocks that it comes to.
    """

    def __init__(self, blocks: Any) -> None:
        self._blocks = blocks

    def __mul__(self, _: Any) -> Any:
        return self._blocks


def blocks_for(name: str, num_tokens: Any, block_size: int) -> Any:
    """The blocks for so many tokens, by what that means: the fewest that hold them."""
    blocks = integer(name, 0)
    assume(blocks * block_size >= num_tokens)
    assume((blocks - 1) * block_size < num_tokens)
    return blocks


@attrs.frozen(kw_only=True)
class Asking:
    """A waiting request asks for blocks: all numbers are symbolic but for the block size and hits.

    Attributes:
        scheduler: The scheduler.
        state: Its state.
        request: Who asks.
        hits: The blocks that it hits.
        watermark: Blocks that are to be left free.
        active: How many of the hits are held by somebody.
        free: Free blocks, inactive hits among them.
        known: Blocks for all known tokens, at most a model's.
    """

    scheduler: Scheduler
    state: State
    request: Request
    hits: tuple[int, ...]
    watermark: Any
    active: Any
    free: Any
    known: Any

    @property
    def inactive(self) -> Any:
        """How many of the hits nobody holds."""
        return len(self.hits) - self.active


def asking(scheduler: type[Scheduler], block_size: int, num_hits: int) -> Asking:
    """Any waiting request that hits so many blocks, in any state."""
    num_output = integer("num_output_tokens", 0)
    num_prompt = integer("num_prompt_tokens", 1)
    num_tokens = num_prompt + num_output
    num_sampled = integer("num_sampled_tokens", 1)
    # Who waits has not ended.
    assume(num_sampled > num_output)
    max_model_len = integer("max_model_len", 2)
    # The last known token is never hit (CACHE-LAST-TOKEN).
    assume(num_hits * block_size <= num_tokens - 1)
    references = [integer(f"ref_cnt_{place}", 0) for place in range(num_hits)]
    free = integer("num_free_blocks", 0)
    active = sum((count > 0 for count in references), start=0)
    # Whom nobody holds is in the free queue.
    assume(free >= num_hits - active)
    watermark = integer("watermark_blocks", 0)
    config = made(
        Config,
        num_gpu_blocks=integer("num_gpu_blocks", 2),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        watermark=Share(watermark),
    )
    given = made(
        NewRequest,
        request_id="r",
        prompt_token_ids=Counted(num_prompt),
        sampled_token_ids=Counted(num_sampled),
    )
    # The null block, and those that are hit.
    blocks = (
        KVCacheBlock(block_id=0),
        *(made(KVCacheBlock, block_id=i + 1, ref_cnt=count) for i, count in enumerate(references)),
    )
    request = made(Request, given=given, num_output_tokens=num_output)
    return Asking(
        scheduler=made(scheduler, config=config),
        state=made(State, requests=(request,), blocks=blocks, free_block_queue=Counted(free)),
        request=request,
        hits=tuple(range(1, num_hits + 1)),
        watermark=watermark,
        active=active,
        free=free,
        known=blocks_for("blocks_for_all_tokens", least(num_tokens, max_model_len), block_size),
    )
