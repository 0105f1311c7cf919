"""musubi-tuner's real caching scripts and dataset classes, on pictures, clips and tiny models.

Each architecture's networks are of its own classes, made small by their constants; no encoder's
call is stood in for.
"""

from __future__ import annotations

import json

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


def test_a_list_of_videos_is_encoded_as_their_folder_would_be(make_real: Make) -> None:
    real = make_real("hunyuan_video")
    data, whole, rows = real.project / "data", real.planned(), []
    for path in data.glob("*.txt"):
        rows.append({"video_path": f"{path.stem}.mp4", "caption": path.read_text()})
        path.unlink()
    (data / "films.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    real.project.configure(
        lambda values: values["datasets"]["shapes"].update(path="data/films.jsonl")
    )
    assert real.build()
    assert {*real.project.cache_files()} == whole
    assert not real.build()
