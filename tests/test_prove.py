"""Proofs: what holds is proved, what is wrong is refuted, and what says nothing doesn't count."""

from __future__ import annotations

import json
from collections.abc import Iterator

import attrs
import pytest
from click.testing import CliRunner, Result

from mustfit_checks import prove_cli
from mustfit_checks.cli import main
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.proofs import Check, Program, made, prove
from mustfit_checks.statements import CHECKS
from mustfit_checks.symbolic import integer, show, witness
from mustfit_spec import REVISIONS, KVCacheBlock, Scheduler, rules_of

BY_NAME = {check.name: check for check in CHECKS}


def command(*words: str) -> Result:
    return CliRunner().invoke(main, ["prove", "--jobs", "1", *words])


@pytest.mark.parametrize("name", BY_NAME)
def test_it_is_proved(name: str) -> None:
    """Of the newest revision; ``mustfit prove --against`` is for the others."""
    result = prove(BY_NAME[name], REVISIONS["0.33.0"])
    assert (result.result, result.reason) == ("proved", None)
    assert result.covered.witnesses.keys() >= set(BY_NAME[name].happens)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("gate-is-exact", "gate-one-block-spare"),
        ("gate-is-exact", "gate-on-prompt"),
        ("gate-is-exact", "gate-beyond-model-length"),
        ("gate-is-exact", "active-hits-cost"),
        ("gate-implies-chunk", "chunk-one-block-spare"),
        ("gate-implies-chunk", "slots-beyond-model-length"),
        ("gate-implies-allocatable", "new-blocks-only"),
        ("admission-preempts-nobody", "admission-preempts"),
        ("refusal-changes-nothing", "blocked-keeps-blocks"),
        ("admission-keeps-the-books", "hit-stays-in-queue"),
        ("blocked-head-hides-everybody", "blocked-skipped"),
        ("blocked-head-hides-everybody", "blocked-to-tail"),
    ],
)
def test_a_wrong_scheduler_is_refuted(name: str, mutant: str) -> None:
    result = prove(BY_NAME[name], MUTANTS[mutant].of("0.33.0"))
    assert result.result == "refuted"
    assert result.reason


def test_checks_are_told_apart_and_are_about_rules() -> None:
    assert len(BY_NAME) == len(CHECKS)
    for check in CHECKS:
        assert set(check.rules) <= rules_of(REVISIONS["0.33.0"]).keys()
        assert check.happens


# --- What doesn't count ---------------------------------------------------------------------------


def _nothing(_: type[Scheduler]) -> Iterator[Program]:
    def program() -> None:
        show(integer("x") * 0 == 0, "nothing")
        witness("it happens")

    yield program


NOTHING = Check(
    name="nothing",
    statement="Nothing.",
    rules=("ALLOC-GATE",),
    scope="all",
    cases=_nothing,
    happens=("it happens",),
)


def test_a_check_whose_premise_cannot_happen_is_unknown() -> None:
    never = attrs.evolve(NOTHING, happens=("it happens", "pigs fly"))
    result = prove(never, REVISIONS["0.33.0"])
    assert result.result == "unknown"
    assert result.reason == "it never happens that pigs fly"


def test_a_check_that_refutes_nobody_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prove_cli.NAMES, "nothing", NOTHING)
    result = command("--check", "nothing", "--json")
    assert result.exit_code == 2
    (told,) = json.loads(result.stdout)["checks"]
    assert told["result"] == "unknown"
    assert told["reason"] == "no wrong scheduler is refuted by it"
    assert command("--check", "nothing", "--no-mutants").exit_code == 0


def _breaking(_: type[Scheduler]) -> Iterator[Program]:
    def program() -> None:
        raise KeyError("nothing")

    yield program


def test_code_that_breaks_is_unknown() -> None:
    result = prove(attrs.evolve(NOTHING, cases=_breaking), REVISIONS["0.33.0"])
    assert (result.result, result.reason) == ("unknown", "it breaks: KeyError('nothing')")


def test_an_object_has_its_defaults_and_what_was_given() -> None:
    assert made(KVCacheBlock, block_id=3) == KVCacheBlock(block_id=3)


# --- The command --------------------------------------------------------------------------------


def test_the_keys_that_others_rely_on() -> None:
    result = command("--check", "gate-is-exact", "--json")
    assert result.exit_code == 0
    (told,) = json.loads(result.stdout)["checks"]
    assert told["name"] == "gate-is-exact"
    assert told["result"] == "proved"
    assert told["seconds"] > 0
    assert "new-blocks-only" in told["refutes"]
    assert told["witness"]["it fits"]["num_prompt_tokens"] >= 1
    assert {"rules", "scope", "statement"} <= told.keys()


def test_a_refutation_says_for_which_values() -> None:
    result = command("--check", "gate-implies-allocatable", "--mutant", "new-blocks-only")
    assert result.exit_code == 1
    assert "refuted: what passes the gate can be allocated whole: num_prompt_tokens=" in (
        result.stdout.replace("num_output_tokens=0, ", "")
    )
    assert "repeat with: mustfit prove --against 0.33.0 --check gate-implies-allocatable" in (
        result.stdout
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--check", "nowhere"), "there is no check 'nowhere'; there are: gate-is-exact"),
        (("--mutant", "nobody"), "there is no mutant 'nobody'"),
        (("--against", "0.1.0"), "vLLM 0.1.0 was never measured"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...], why: str) -> None:
    result = command(*words)
    assert result.exit_code == 2
    assert why in result.stderr
