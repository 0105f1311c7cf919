"""Results of an evaluation with small real clips, for its page."""

from __future__ import annotations

from pathlib import Path

import video_world
from latentmake.base import digest
from latentmake.runs.results import EVALUATED, KINDS, EvaluatedClip, Losses, Metrics, Result

FPS = 24
TIMESTEPS = [950.0, 500.0, 50.0]


def make_clip(
    folder: Path, name: str, frames: int, size: tuple[int, int] = (64, 48)
) -> EvaluatedClip:
    folder.mkdir(parents=True, exist_ok=True)
    path = video_world.write_video(folder / name, "libx264", frames, size=size)
    content, (width, height) = digest.of_file(path), size
    return EvaluatedClip(
        key=name, file=name, digest=content, width=width, height=height, frames=frames
    )


def make_metrics(folder: Path, captions: list[str], frames: int = 25) -> Path:
    """Write clips and results of an item a caption; return the path of `metrics.json`."""
    base, adapter = [0.25, 0.5, 0.75], [0.2, 0.4, 0.9]
    results = [
        Result(
            name=f"waves/{number:02d} 64",
            source=f"data/waves/{number:02d}.mp4",
            caption=caption,
            losses={
                "base": Losses(key="b", values=base),
                "adapter": Losses(key="a", values=adapter),
            },
            clips={kind: make_clip(folder, f"{number}_{kind}.mp4", frames) for kind in KINDS},
        )
        for number, caption in enumerate(captions)
    ]
    metrics = Metrics(
        run="waves",
        parts={},
        values={EVALUATED: {"steps": "4"}},
        timesteps=TIMESTEPS,
        loss={"base": 0.5, "adapter": 0.4},
        loss_by_timestep={"base": base, "adapter": adapter},
        fps=FPS,
        items="2 held out, 2 with clips",
        results=results,
    )
    path = folder / "metrics.json"
    metrics.write(path)
    return path
