"""Which rules count as exercised: where they mattered, and not where they only ran."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from mustfit_checks.exercise import DECISIVE, exercised
from mustfit_checks.generate import scenarios
from mustfit_spec import (
    REVISIONS,
    Config,
    NewRequest,
    Operation,
    Scenario,
    Scheduler,
    rules_of,
    run,
)

#: These matter whenever their method runs.
WHENEVER_CALLED = {
    "CACHE-HASH",
    "PREEMPT-FREE",
    "PREEMPT-SELF",
    "RUN-PASS-OVER",
    "STEP-FINISH",
    "WAIT-ADMIT",
    "WAIT-BLOCKED",
}

#: Two revisions that have every rule between them.
OLD, NEW = "0.27.0", "0.33.0"

#: Each rule in each of the two that has it.
RULES = [
    (revision, rule_id) for revision in (OLD, NEW) for rule_id in rules_of(REVISIONS[revision])
]


def called(scenario: Scenario, scheduler: type[Scheduler]) -> frozenset[str]:
    """The rules whose methods ran, found without the code under test."""
    seen: set[str] = set()

    def noting(rule_id: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def noted(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
            seen.add(rule_id)
            return method(self, *args, **kwargs)

        return noted

    methods = {
        rule.method: noting(rule_id, getattr(scheduler, rule.method))
        for rule_id, rule in rules_of(scheduler).items()
    }
    run(scenario, type("Noting", (scheduler,), methods)(scenario.config))
    return frozenset(seen)


@functools.cache
def searched(revision: str) -> list[tuple[frozenset[str], frozenset[str]]]:
    """Of many generated scenarios, the rules that ran and those that mattered."""
    scheduler = REVISIONS[revision]
    drawn = scenarios(seed=0, count=300, lacks=scheduler.lacks)
    return [(called(s, scheduler), exercised(s, scheduler)[1]) for s in drawn]


@pytest.mark.parametrize(("revision", "rule_id"), RULES)
def test_a_rule_counts_in_some_scenario_and_not_in_another_although_it_ran(
    revision: str, rule_id: str
) -> None:
    found = searched(revision)
    assert any(rule_id in mattered for _, mattered in found)
    if rule_id in WHENEVER_CALLED:
        assert all((rule_id in ran) == (rule_id in mattered) for ran, mattered in found)
        assert any(rule_id not in ran for ran, _ in found)
    else:
        assert any(rule_id in ran and rule_id not in mattered for ran, mattered in found)


@pytest.mark.parametrize("revision", [OLD, NEW])
def test_what_did_not_run_did_not_matter(revision: str) -> None:
    for ran, mattered in searched(revision):
        assert mattered <= ran


def test_the_two_revisions_have_every_rule() -> None:
    assert {rule_id for _, rule_id in RULES} == set(DECISIVE)


# --- By hand --------------------------------------------------------------------------------------


def rules(
    *lengths: int, revision: str = NEW, steps: int = 3, output: int = 2, **config: Any
) -> frozenset[str]:
    """What requests with prompts of these lengths exercise, all added at once."""
    fields: dict[str, Any] = {
        "num_gpu_blocks": 40,
        "block_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    requests = tuple(
        NewRequest(
            request_id=f"r{i}",
            prompt_token_ids=tuple(range(100 * i, 100 * i + length)),
            sampled_token_ids=tuple(range(100 * i + 50, 100 * i + 50 + output)),
        )
        for i, length in enumerate(lengths)
    )
    adds = tuple(Operation(op="add", request_id=request.request_id) for request in requests)
    scenario = Scenario(
        scenario_id="by hand",
        config=Config(**fields | config),
        requests=requests,
        operations=adds + (Operation(op="step"),) * steps,
    )
    return exercised(scenario, REVISIONS[revision])[1]


@pytest.mark.parametrize(
    ("rule_id", "mattered", "given"),
    [
        ("STEP-THRESHOLD", False, {"lengths": (9, 9)}),
        ("STEP-THRESHOLD", True, {"lengths": (9, 9), "long_prefill_token_threshold": 8}),
        ("STEP-THRESHOLD", False, {"lengths": (8, 9), "long_prefill_token_threshold": 9}),
        # Alone, and spared: it would have been limited. In an older revision it is.
        ("STEP-THRESHOLD", True, {"lengths": (9,), "long_prefill_token_threshold": 8}),
        ("STEP-THRESHOLD", False, {"lengths": (8,), "long_prefill_token_threshold": 8}),
        (
            "STEP-THRESHOLD",
            True,
            {"lengths": (9,), "long_prefill_token_threshold": 8, "revision": OLD},
        ),
        (
            "STEP-THRESHOLD",
            False,
            {"lengths": (8,), "long_prefill_token_threshold": 8, "revision": OLD},
        ),
        # Adapted, to 16: it would have been limited.
        (
            "STEP-THRESHOLD",
            True,
            {
                "lengths": (9, 9),
                "long_prefill_token_threshold": 8,
                "long_prefill_token_threshold_adaptive": True,
            },
        ),
        (
            "STEP-THRESHOLD",
            False,
            {
                "lengths": (8, 8),
                "long_prefill_token_threshold": 8,
                "long_prefill_token_threshold_adaptive": True,
            },
        ),
        ("STEP-BUDGET", False, {"lengths": (9,)}),
        ("STEP-BUDGET", False, {"lengths": (9,), "max_num_scheduled_tokens": 32}),
        ("STEP-BUDGET", True, {"lengths": (9,), "max_num_scheduled_tokens": 31}),
        ("STEP-BUDGET", True, {"lengths": (9,), "max_num_scheduled_tokens": 33}),
        ("WAIT-GATE", False, {"lengths": (9, 9)}),
        ("WAIT-GATE", True, {"lengths": (9, 9), "num_gpu_blocks": 5}),
        ("WAIT-GATE", True, {"lengths": (9,), "scheduler_reserve_full_isl": False}),
        ("WAIT-TOKENS", False, {"lengths": (9, 9)}),
        ("WAIT-TOKENS", True, {"lengths": (33,)}),
        (
            "WAIT-TOKENS",
            True,
            {
                "lengths": (20, 20),
                "max_model_len": 32,
                "enable_chunked_prefill": False,
                "steps": 1,
            },
        ),
        ("ALLOC-COUNT", False, {"lengths": (9,), "steps": 1}),
        ("ALLOC-COUNT", True, {"lengths": (9,), "steps": 2}),
        ("ALLOC-HEAD", False, {"lengths": (3,), "num_gpu_blocks": 2}),
        ("ALLOC-HEAD", True, {"lengths": (3,), "num_gpu_blocks": 3}),
    ],
)
def test_by_hand(rule_id: str, *, mattered: bool, given: dict[str, Any]) -> None:
    lengths = given["lengths"]
    others = {name: value for name, value in given.items() if name != "lengths"}
    assert (rule_id in rules(*lengths, **others)) is mattered


def test_a_failure_says_something_of_one_rule_only() -> None:
    """Not of all those whose methods it passes through."""
    scheduler = REVISIONS[OLD]
    fails = 0
    for drawn in scenarios(seed=0, count=300, lacks=scheduler.lacks):
        trace, mattered = exercised(drawn, scheduler)
        assert ("STEP-ASSERT" in mattered) == (trace.error is not None)
        if trace.error is None:
            continue
        fails += 1
        # STEP-OUTPUT's method was left by the failure; it mattered if a request ended before.
        ended = any(step.finished for step in trace.steps)
        assert ("STEP-OUTPUT" in mattered) == ended
    assert fails


def test_to_ask_whether_a_rule_mattered_exercises_no_other() -> None:
    """Whether the gate would have refused a running request is asked by means of the gate."""
    mattered = rules(
        20, steps=2, num_gpu_blocks=5, max_num_batched_tokens=8, scheduler_reserve_full_isl=False
    )
    assert "RUN-NO-GATE" in mattered
    assert not {"ALLOC-GATE", "ALLOC-GATE-LENGTH"} & mattered
