"""How the revisions of the semantics differ, as switches.

The specification has these as overridden methods (``mustfit_spec.revisions``), with their sources
in vLLM. Here they are values, read once when a scheduler is made.
"""

from __future__ import annotations

from typing import Literal

import attrs

from mustfit_spec import Config, ConfigError

#: Which freed blocks go to the head of the free queue instead of its tail.
FreedToHead = Literal["none", "uncached", "uncached if prefixes are cached"]


@attrs.frozen(kw_only=True)
class Semantics:
    """What one revision does where revisions differ.

    Attributes:
        lacks: Configuration fields that it doesn't have.
        admission_takes_lookahead: Whether an admission takes lookahead slots.
        freed_to_head: Which freed blocks are reused before all others.
        batched_tokens_limit_budget: Whether ``max_num_batched_tokens`` limits a step also where
            ``max_num_scheduled_tokens`` is set.
        negative_chunks: Whether a request beyond ``max_model_len`` gets a negative chunk.
        passed_over_victim_costs_a_turn: Whether the next request loses its turn when a victim that
            was passed over stood before it.
        min_tokens_counts: Whether ``min_tokens`` keeps a request from ending.
        threshold_spares_a_lone_request: Whether the threshold applies only among two or more.
        self_preemption_ends_priority_loop: Whether it ends the running loop by priority, too.
    """

    lacks: frozenset[str] = frozenset(
        {"watermark", "max_num_active_seqs", "long_prefill_token_threshold_adaptive"}
    )
    admission_takes_lookahead: bool = False
    freed_to_head: FreedToHead = "none"
    batched_tokens_limit_budget: bool = False
    negative_chunks: bool = True
    passed_over_victim_costs_a_turn: bool = True
    min_tokens_counts: bool = True
    threshold_spares_a_lone_request: bool = False
    self_preemption_ends_priority_loop: bool = True

    def check(self, config: Config) -> None:
        """Refuses a configuration that sets a field which this revision lacks.

        Raises:
            ConfigError: It does.
        """
        for field in attrs.fields(Config):
            if field.name in self.lacks and getattr(config, field.name) != field.default:
                raise ConfigError(f"{field.name} does not exist in this revision")


def _revisions() -> dict[str, Semantics]:
    v0_21_0 = Semantics()
    v0_23_0 = attrs.evolve(v0_21_0, admission_takes_lookahead=True)
    v0_24_0 = attrs.evolve(v0_23_0, lacks=v0_23_0.lacks - {"watermark"}, freed_to_head="uncached")
    v0_27_0 = attrs.evolve(v0_24_0, freed_to_head="uncached if prefixes are cached")
    v0_28_0 = attrs.evolve(
        v0_27_0,
        freed_to_head="uncached",
        batched_tokens_limit_budget=True,
        negative_chunks=False,
        passed_over_victim_costs_a_turn=False,
    )
    v0_29_0 = attrs.evolve(v0_28_0, min_tokens_counts=False)
    v0_31_0 = attrs.evolve(v0_29_0, lacks=frozenset(), threshold_spares_a_lone_request=True)
    v0_33_0 = attrs.evolve(v0_31_0, self_preemption_ends_priority_loop=False)
    return {
        "0.21.0": v0_21_0,
        "0.23.0": v0_23_0,
        "0.24.0": v0_24_0,
        "0.27.0": v0_27_0,
        "0.28.0": v0_28_0,
        "0.29.0": v0_29_0,
        "0.31.0": v0_31_0,
        "0.33.0": v0_33_0,
    }


#: Every revision, oldest first, by the first vLLM release that behaves so.
REVISIONS: dict[str, Semantics] = _revisions()

#: The newest of them.
NEWEST = list(REVISIONS)[-1]
