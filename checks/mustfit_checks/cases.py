"""Cases on disk: the scenario that shows a divergence, and what was expected and observed.

The scenario is a file of its own, one line, in the form that a scheduler under test reads; so
``mustfit judge --case FILE`` judges it again, and ``my-scheduler < FILE`` answers it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mustfit_checks.judge import Divergence
from mustfit_checks.protocol import encode


def save(divergence: Divergence, folder: Path) -> Path:
    """Write a divergence's scenario and both traces; returns the scenario's file.

    Raises:
        OSError: The folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    scenario = encode(divergence.scenario)
    digest = hashlib.sha256(scenario).hexdigest()[:8]
    path = folder / f"{divergence.rule}-{digest}.jsonl"
    path.write_bytes(scenario + b"\n")
    path.with_suffix(".expected.json").write_bytes(encode(divergence.expected) + b"\n")
    path.with_suffix(".observed.json").write_bytes(encode(divergence.observed) + b"\n")
    return path
