"""Cases on disk: the scenario that shows a divergence, and what was expected and observed.

The scenario is a file of its own, one line, in the form that a scheduler under test reads; so
``mustfit judge --case FILE`` judges it again, and ``my-scheduler < FILE`` answers it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mustfit_checks.judge import Divergence
from mustfit_checks.protocol import encode
from mustfit_spec import Scenario


def save(divergence: Divergence, folder: Path) -> Path:
    """Write a divergence's scenario and both traces; returns the scenario's file.

    Raises:
        OSError: The folder can't be written.
    """
    path = save_scenario(divergence.scenario, divergence.rule or "failure", folder)
    path.with_suffix(".expected.json").write_bytes(encode(divergence.expected) + b"\n")
    path.with_suffix(".observed.json").write_bytes(encode(divergence.observed) + b"\n")
    return path


def save_scenario(scenario: Scenario, name: str, folder: Path) -> Path:
    """Write a scenario; returns its file, which is called after ``name`` and its content.

    Raises:
        OSError: The folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    line = encode(scenario)
    path = folder / f"{name}-{hashlib.sha256(line).hexdigest()[:8]}.jsonl"
    path.write_bytes(line + b"\n")
    return path
