"""The real vLLM scheduler, judged; and a vLLM that somebody changed, found out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import mustfit_impl
from mustfit_checks.attribute import mutant_trace
from mustfit_checks.generate import scenarios
from mustfit_checks.judge import Judge, Verdict
from mustfit_checks.measured import likely_revision
from mustfit_checks.mutants import MUTANTS
from mustfit_checks.sut import InProcess, Limits, Sut
from mustfit_checks.vllm_setup import Installed
from mustfit_checks.what import SOURCE, What, start
from mustfit_spec import REVISIONS, rules_of

pytestmark = pytest.mark.vllm

COUNT = 2000


def judged(sut: Sut, release: str, count: int, stop_after: int = 100) -> Verdict:
    revision = REVISIONS[likely_revision(release)]
    judge = Judge(
        sut=sut, against=release, revision=revision, profile="identity", stop_after=stop_after
    )
    return judge.judge(scenarios(seed=0, count=count, lacks=revision.lacks))


def test_the_specification_is_what_vllm_does(vllm_release: str, vllm: Callable[[str], Sut]) -> None:
    verdict = judged(vllm(vllm_release), vllm_release, COUNT)
    assert verdict.reason is None
    assert [d.difference for d in verdict.divergences] == []
    assert verdict.scenarios == COUNT
    assert verdict.never_exercised == ()
    assert set(verdict.rules) == set(rules_of(REVISIONS[likely_revision(vllm_release)]))


def test_the_implementation_is_judged_by_vllm_itself(
    vllm_release: str, vllm: Callable[[str], Sut]
) -> None:
    revision = likely_revision(vllm_release)
    verdicts = [
        Judge(
            sut=sut,
            against=f"vllm:{vllm_release}",
            revision=REVISIONS[revision],
            profile="identity",
            reference=vllm(vllm_release),
        ).judge(scenarios(seed=1, count=300, lacks=REVISIONS[revision].lacks))
        for sut in (
            InProcess(partial(mustfit_impl.run, revision=revision), name="impl"),
            InProcess(
                lambda scenario: mutant_trace(scenario, MUTANTS["oldest-first"], revision),
                name="mutant",
            ),
        )
    ]
    assert [verdict.verdict for verdict in verdicts] == ["conformant", "divergent"]
    assert verdicts[0].scenarios == 300
    assert verdicts[1].divergences[0].behaves_like == "oldest-first"


#: Changes that somebody might make to vLLM's scheduler: file, what stands there, what instead.
CHANGES = [
    pytest.param(
        "v1/core/sched/scheduler.py",
        "full_sequence_must_fit=self.scheduler_reserve_full_isl",
        "full_sequence_must_fit=False",
        "ALLOC-GATE",
        id="gate-off",
    ),
    pytest.param(
        "v1/core/sched/scheduler.py",
        "if not preempted_reqs and",
        "if",
        "WAIT-AFTER-PREEMPT",
        id="admission-after-preemption",
    ),
    pytest.param(
        "v1/core/single_type_kv_cache_manager.py",
        "ordered_blocks = reversed(req_blocks)",
        "ordered_blocks = req_blocks",
        "ALLOC-FREE-ORDER",
        id="freed-head-first-0.22.1",
    ),
    pytest.param(
        "v1/core/single_type_kv_cache_manager.py",
        "self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))",
        "self.block_pool.free_blocks(self.pop_blocks_for_free(request_id))",
        "ALLOC-FREE-ORDER",
        id="freed-head-first",
    ),
]


@pytest.mark.parametrize(("file", "old", "new", "rule"), CHANGES)
def test_a_changed_vllm_is_found_out(
    vllm_release: str,
    install: Callable[[str], Installed],
    tmp_path: Path,
    file: str,
    old: str,
    new: str,
    rule: str,
) -> None:
    """What the maintainer of a fork uses ``--vllm-source`` for."""
    source = install(vllm_release).source
    text = (source / "vllm" / file).read_text(encoding="utf-8")
    if old not in text:
        pytest.skip(f"vLLM {vllm_release} puts it differently")
    tree = tmp_path / "tree"
    shutil.copytree(source / "vllm", tree / "vllm", copy_function=os.symlink)
    changed = tree / "vllm" / file
    changed.unlink()
    changed.write_text(text.replace(old, new), encoding="utf-8")

    asked = What(
        name=f"vllm:{SOURCE}",
        against=vllm_release,
        revision=REVISIONS[likely_revision(vllm_release)],
    )
    sut = start(asked, profile="identity", source=tree, limits=Limits(), progress=lambda _: None)
    with sut:
        verdict = judged(sut, vllm_release, COUNT, stop_after=40)
    assert verdict.verdict == "divergent"
    # A change may also make vLLM fail by itself, which breaks no rule in particular.
    assert {d.rule for d in verdict.divergences} - {None} == {rule}
    found = next(d for d in verdict.divergences if d.rule == rule)
    assert len(found.scenario.requests) <= 4
