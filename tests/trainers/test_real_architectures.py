"""musubi-tuner's real caching scripts and dataset classes, on pictures, clips and tiny models.

Each architecture's networks are of its own classes, made small by their constants; no encoder's
call is stood in for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import Make
from real_models import WORLDS
from real_project import check

pytestmark = pytest.mark.real_trainer


@pytest.mark.parametrize("name", WORLDS)
def test_real_scripts_make_what_is_stale_and_real_datasets_load_it(
    name: str, make_real: Make
) -> None:
    check(make_real(name))


def test_a_list_of_videos_is_the_same_items_as_their_folder(
    make_real: Make,
) -> None:
    real = make_real("hunyuan_video")
    whole = real.planned()
    rows = {
        path.with_suffix(".txt"): {"video_path": path.name}
        for path in sorted((real.project / "data").glob("*.mp4"))
    }
    assert len(rows) == 6
    for path, row in rows.items():
        row["caption"] = path.read_text()
        path.unlink()
    listed = real.project / "data/films.jsonl"

    def write() -> None:
        listed.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))

    write()
    real.project.configure(
        lambda values: [
            each.update(path="data/films.jsonl") for each in values["datasets"].values()
        ]
    )
    assert real.planned() == whole
    assert real.build()
    assert not real.build()
    shutil.rmtree(".latentmake", ignore_errors=True)
    assert not real.build()
    first = next(iter(rows.values()))
    first["caption"] = "another caption"
    write()
    (stale,) = real.planned()
    assert stale.endswith(f"{Path(first['video_path']).stem}_hv_te.safetensors")
    first["first_frame"] = 1
    write()
    assert not [name for name in real.planned() if Path(first["video_path"]).stem in name]
    session = real.session(read_only=True)
    (faults,) = (run.faults for run in session.plan.runs.values())
    (fault,) = [each for found in faults.values() for each in found]
    assert "read videos from their first frame" in fault.line
