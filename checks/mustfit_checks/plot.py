"""Drawing a replay: blocks, requests and preemptions over simulated time, one column a replay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from mustfit_checks.replay import Replayed

#: What can be written.
SUFFIXES = (".png", ".svg", ".pdf")

#: Told apart by the colour-blind, too (Okabe and Ito).
BLUE, ORANGE, RED = "#0072B2", "#E69F00", "#D55E00"


def draw(replays: Mapping[str, Replayed], num_blocks: int, file: Path) -> None:
    """Draws replays side by side, on the same scales.

    Args:
        replays: What to draw, by title. Each has a timeline.
        num_blocks: Blocks that can be handed out.
        file: Where to, its suffix one of ``SUFFIXES``.

    Raises:
        OSError: The file can't be written.
    """
    # Nothing in the file depends on when it was made.
    with mpl.rc_context({"svg.hashsalt": "mustfit"}):
        figure = Figure(figsize=(5 * len(replays), 7), layout="constrained")
        axes = figure.subplots(3, len(replays), sharex=True, sharey="row", squeeze=False)
        for column, (title, replay) in enumerate(replays.items()):
            samples = replay.timeline.samples if replay.timeline is not None else []
            seconds = [sample.at / 1e6 for sample in samples]
            blocks, requests, preemptions = axes[:, column]
            blocks.set_title(
                f"{title}\n{replay.preemptions:,} preemptions, "
                f"{replay.recomputed_tokens:,} tokens computed again"
            )
            blocks.plot(seconds, [s.used_blocks for s in samples], color=BLUE, linewidth=0.6)
            blocks.axhline(num_blocks, color="gray", linewidth=0.8, linestyle="--")
            requests.plot(
                seconds, [s.waiting for s in samples], color=ORANGE, linewidth=1, label="waiting"
            )
            requests.plot(
                seconds, [s.running for s in samples], color=BLUE, linewidth=0.8, label="running"
            )
            preemptions.plot(seconds, [s.preemptions for s in samples], color=RED, linewidth=1.2)
            preemptions.set_xlabel("simulated time (s)")
            requests.set_yscale("symlog", linthresh=10)
        axes[0, 0].set_ylabel("KV blocks held")
        axes[1, 0].set_ylabel("requests")
        axes[1, 0].legend(loc="upper right", frameon=False)
        axes[2, 0].set_ylabel("preemptions so far")
        for axis in axes.flat:
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.25)
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
