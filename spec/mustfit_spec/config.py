"""The configuration of a scheduler, under vLLM's own names."""

from __future__ import annotations

from typing import Any, Literal

import attrs

Policy = Literal["fcfs", "priority"]


class ConfigError(ValueError):
    """A configuration that makes no sense, or that a revision of the semantics does not have."""


def at_least(minimum: int, *, at_most: int | None = None, default: Any = attrs.NOTHING) -> Any:
    """A whole-number field with bounds, which the JSON Schema shows as well."""
    validators = [attrs.validators.ge(minimum)]
    metadata = {"minimum": minimum}
    if at_most is not None:
        validators.append(attrs.validators.le(at_most))
        metadata["maximum"] = at_most
    return attrs.field(
        default=default,
        validator=attrs.validators.optional(attrs.validators.and_(*validators)),
        metadata=metadata,
    )


def _below_one(_: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ConfigError(f"{attribute.name} must be at least 0 and below 1, not {value}")


@attrs.frozen(kw_only=True)
class Config:
    """What decides how a scheduler behaves; every name is vLLM's.

    Fields are keyword-only, so that a later field never rebinds a caller's arguments.

    Attributes:
        num_gpu_blocks: KV blocks in the pool, the null block counted: one fewer can be handed out.
            At most 1,000,000, a limit of mustfit's own: it holds the pool block by block.
        block_size: Tokens that a block holds.
        max_model_len: Longest sequence, prompt and output together, in tokens.
        max_num_seqs: Most requests in ``running``.
        max_num_batched_tokens: Most tokens that a step may schedule, but for
            ``max_num_scheduled_tokens``.
        max_num_scheduled_tokens: A second such limit; ``None``: none of its own. Up to 0.27.1 it
            stands instead of the first, and may exceed it.
        max_num_active_seqs: Most requests in ``running`` that admission may lead to;
            ``None``: ``max_num_seqs``.
        enable_chunked_prefill: Whether a waiting request may be admitted with fewer tokens than it
            has left to compute.
        enable_prefix_caching: Whether full blocks are kept for later requests with the same prefix.
        long_prefill_token_threshold: Most tokens that one request gets in a step; 0: no limit.
        long_prefill_token_threshold_adaptive: Whether that limit is at least a fair share of the
            step's tokens.
        policy: ``fcfs`` or ``priority``.
        scheduler_reserve_full_isl: Whether a waiting request is admitted only if all its known
            tokens fit in the free blocks (``allocate_slots(full_sequence_must_fit=...)``).
        watermark: Share of the pool that an admission has to leave free.
        num_lookahead_tokens: Slots that an allocation takes beyond the tokens it computes.

    Raises:
        ConfigError: For values that make no sense, most of which vLLM refuses too.

    Source: vLLM 0.33.0, ``vllm/config/scheduler.py`` (limits: ``verify_max_model_len``) and
    ``vllm/config/cache.py``.
    """

    num_gpu_blocks: int = at_least(2, at_most=1_000_000)
    block_size: int = at_least(1)
    max_model_len: int = at_least(2)
    max_num_seqs: int = at_least(1)
    max_num_batched_tokens: int = at_least(1)
    max_num_scheduled_tokens: int | None = at_least(1, default=None)
    max_num_active_seqs: int | None = at_least(1, default=None)
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = at_least(0, default=0)
    long_prefill_token_threshold_adaptive: bool = False
    policy: Policy = attrs.field(
        default="fcfs", validator=attrs.validators.in_(("fcfs", "priority"))
    )
    scheduler_reserve_full_isl: bool = True
    watermark: float = attrs.field(
        default=0.0, validator=_below_one, metadata={"minimum": 0.0, "exclusiveMaximum": 1.0}
    )
    num_lookahead_tokens: int = at_least(0, default=0)

    def __attrs_post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill, max_num_batched_tokens ({self.max_num_batched_tokens}) "
                f"must be at least max_model_len ({self.max_model_len})"
            )
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > self.max_num_seqs:
            raise ConfigError(
                f"max_num_active_seqs ({self.max_num_active_seqs}) must be at most "
                f"max_num_seqs ({self.max_num_seqs})"
            )
        if self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) must be at "
                f"most max_model_len ({self.max_model_len})"
            )
