"""clips_{run}: clips of videos as .npz files and train.jsonl, and what own training loops read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
import torch
import video_world
import wan
from diffusers import WanTransformer3DModel
from latentmake.base.errors import UserError
from latentmake.data.memo import MEMO, Memo
from latentmake.plan.estimates import Past, learn_job
from latentmake.trainers.loop.cached_clips import CachedClipDataset, ClipDataset, collate_fn
from project import Project
from safetensors.torch import load_file
from torch.utils.data import DataLoader

CAPTIONS = {"calm": "a calm sea", "storm": "a storm", "wind": "wind in the trees"}
RUN = "tiny"
ROOT = Path(__file__).resolve().parents[2]
DOCUMENTED = {"MODEL": "models/Wan2.1-T2V-1.3B-Diffusers", "RUN": "runs/films"}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, wan_model: Path) -> Project:
    """A project with three videos, nothing built. Not to be changed: copy it."""
    values = wan.config()
    values["datasets"] = {
        "films": {
            "path": "data/films",
            "target_frames": 5,
            "frame_extraction": "chunk",
            "sample_stride": 2,
            "fit": "crop",
        }
    }
    values["runs"] = {RUN: {"datasets": ["films"], "model": "wan", "resolutions": [[48, 32]]}}
    project = Project.make(tmp_path_factory.mktemp("clips") / "project", values, wan_model)
    folder = project / "data/films"
    folder.mkdir(parents=True)
    for number, (stem, caption) in enumerate(CAPTIONS.items()):
        path = folder / f"{stem}.mp4"
        options = {"bf": "2", "g": "5", "crf": str(20 + 8 * number)}  # no two alike
        video_world.write_video(path, "libx264", 22 + number, size=(96, 80), **options)
        path.with_suffix(".txt").write_text(f"{caption}\n", encoding="utf-8")
    return project


@pytest.fixture(scope="module")
def cut(template: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The same with its clips cut. Not to be changed: copy it."""
    project = template.copy(tmp_path_factory.mktemp("cut") / "project")
    result = project.run(f"clips_{RUN}", "--cores", "2")
    assert "6 written, 0 kept, 0 removed, 0 sources faulty" in result.output
    result.one_line(f"clips: 0.1 MB in clips/{RUN}")
    assert not project.cache_files()  # nothing was encoded
    return project


@pytest.fixture(scope="module")
def built(cut: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The same with the caches of the videos. Not to be changed: copy it."""
    project = cut.copy(tmp_path_factory.mktemp("built") / "project")
    project.run(f"caches_{RUN}")
    return project


def rows(project: Project) -> list[dict[str, Any]]:
    text = (project / f"clips/{RUN}/train.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def files(project: Project) -> dict[str, tuple[bytes, int]]:
    return {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (project / f"clips/{RUN}").iterdir()
    }


def pictures(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as file:
        return [np.array(frame.to_image()) for frame in file.decode(video=0)]


def changed(before: dict[str, tuple[bytes, int]], after: dict[str, tuple[bytes, int]]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_clips_are_cut_without_the_models(template: Project, tmp_path: Path) -> None:
    project = template.copy(tmp_path / "project")
    (project / "models").rename(project / "elsewhere")
    assert project.run("-n", "-p", f"clips_{RUN}").jobs == [f"clips_{RUN}"]
    refused = project.run("-n", f"clips_{RUN}", f"caches_{RUN}", check=False)
    assert refused.returncode
    refused.one_line("models.wan.vae", "does not exist")


def test_each_clip_is_an_array_of_its_frames_and_a_row_that_says_where_it_is_from(
    cut: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    listed = rows(cut)
    names = [f"{stem}_{start:05d}-005.npz" for stem in CAPTIONS for start in (0, 5)]
    assert set(files(cut)) == {*names, "train.jsonl"}
    for row, name in zip(listed, names, strict=True):
        stem, start = name[:-14], int(name[-13:-8])
        assert row == {
            "npz": f"clips/{RUN}/{name}",
            "video": f"clips/{RUN}/{name}",
            "prompt": CAPTIONS[stem],
            "source_video": f"data/films/{stem}.mp4",
            "source_first_frame": 2 * start,
            "source_stride": 2,
        }
        with np.load(cut / f"clips/{RUN}/{name}", allow_pickle=False) as archive:
            assert archive.files == ["frames"]
            found = archive["frames"]
        assert found.dtype == np.uint8 and found.shape == (5, 32, 48, 3)
        decoded = pictures(cut / row["source_video"])[2 * start : 2 * start + 10 : 2]
        wanted = [
            cv2.resize(each, (48, 40), interpolation=cv2.INTER_AREA)[4:36] for each in decoded
        ]
        assert np.array_equal(found, np.stack(wanted))
    for place in (cut.folder, tmp_path):  # the list's own working directory, and another one
        monkeypatch.chdir(place)
        clips = ClipDataset(cut / f"clips/{RUN}")
        batches = list(DataLoader(clips, 4, num_workers=1, multiprocessing_context="spawn"))
        assert [batch["frames"].shape[0] for batch in batches] == [4, 2]
        assert [x for batch in batches for x in batch["prompts"]] == [x["prompt"] for x in listed]
        made = torch.from_numpy(found).permute(0, 3, 1, 2).float() / 127.5 - 1
        assert torch.equal(batches[-1]["frames"][-1], made)
    with pytest.raises(UserError, match=r"no list of clips; run `latentmake build clips_"):
        ClipDataset("none.jsonl")


def test_only_what_is_stale_is_cut_again_and_files_of_what_is_gone_go(
    cut: Project, tmp_path: Path
) -> None:
    project = cut.copy(tmp_path / "project")
    project.scramble_mtimes()
    before = files(project)
    result = project.run(f"clips_{RUN}")
    result.one_line("nothing to do: 0 written, 6 kept, 0 removed")
    assert files(project) == before
    project.ask("explain", f"clips_{RUN}").one_line(f"clips_{RUN}: fresh")
    (project / "data/films/calm.txt").write_text("a very calm sea\n")
    said = project.ask("explain", f"clips_{RUN}")
    said.one_line(f"clips/{RUN}/train.jsonl: prompts, clips or columns have changed")
    video_world.write_video(project / "data/films/storm.mp4", "mpeg4", 12, size=(96, 80))
    for ending in ("mp4", "txt"):
        (project / f"data/films/wind.{ending}").unlink()
    (project / f"clips/{RUN}/mine.npz").write_bytes(b"of somebody else")
    before = files(project)
    said = project.ask("explain", f"clips/{RUN}/storm_00000-005.npz")
    said.one_line(f"clips/{RUN}/storm_00000-005.npz: stale")
    said.one_line("differs     video, size and frame rate")
    project.ask("explain", f"clips/{RUN}/calm_00000-005.npz").one_line("npz: fresh")
    result = project.run(f"clips_{RUN}")
    result.one_line("1 written, 2 kept, 3 removed")
    project.ask("explain", f"clips_{RUN}").one_line(f"clips_{RUN}: fresh")
    after = files(project)
    assert changed(before, after) == {
        "train.jsonl",
        "storm_00000-005.npz",
        "storm_00005-005.npz",  # the new video is shorter
        "wind_00000-005.npz",
        "wind_00005-005.npz",
    }
    assert "mine.npz" in after and "storm_00005-005.npz" not in after
    assert [row["prompt"] for row in rows(project)] == ["a very calm sea"] * 2 + ["a storm"]
    project.run(f"clips_{RUN}").one_line("nothing to do: 0 written, 3 kept, 0 removed")


def test_the_list_of_cut_clips_is_a_dataset_with_the_same_latents(
    built: Project, tmp_path: Path
) -> None:
    project = built.copy(tmp_path / "project")

    def add(values: dict[str, Any]) -> None:
        values["datasets"]["cut"] = {
            "path": f"clips/{RUN}/train.jsonl",
            "target_frames": 5,
            "fit": "crop",
        }
        values["runs"]["again"] = {**values["runs"][RUN], "datasets": ["cut"]}

    project.configure(add)
    project.run("caches_again")

    def tensors(run: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {
            (row["source"], path): load_file(project / path)
            for row in project.manifest(run)
            for path in row["latents"]["48x32"]
        }

    rows_of_cut = {row["npz"]: row for row in rows(project)}
    assert {row["row"]["source_video"] for row in project.manifest("again")} == {
        f"data/films/{stem}.mp4" for stem in CAPTIONS
    }
    found = tensors("again")
    wanted = {
        (source, int(path.split("_")[-3].partition("-")[0])): value
        for (source, path), value in tensors(RUN).items()
    }
    assert len(found) == len(wanted) == 6
    for (source, _), made in found.items():
        row = rows_of_cut[source]
        first = wanted[row["source_video"], row["source_first_frame"] // row["source_stride"]]
        assert made.keys() == first.keys()
        assert all(made[name].equal(first[name]) for name in made)


# -- own loops ------------------------------------------------------------------------------------


def test_cached_clips_are_those_of_the_manifest_with_text_padded_in_batches(built: Project) -> None:
    clips = CachedClipDataset(built / f"runs/{RUN}")
    assert len(clips) == 6
    items = [clips[index] for index in range(6)]
    for item in items:
        (path, *_) = item["row"]["latents"]["48x32"]
        assert item["latents"].shape == (16, 2, 4, 6) and item["latents"].dtype == torch.float32
        assert item["prompt"] == CAPTIONS[item["row"]["stem"]]
        (text,) = load_file(built / item["row"]["text"]["48x32"]).values()
        assert torch.equal(item["text"], text) and 1 < len(text) < 512
        assert path.startswith("cache/films/wan/48x32/")
    found = {tuple(item["latents"].flatten().tolist()) for item in items}
    assert len(found) == 6
    for start in ("fork", "spawn"):
        loader = DataLoader(
            clips, 3, num_workers=1, collate_fn=collate_fn, multiprocessing_context=start
        )
        batches = list(loader)
        assert torch.cat([batch["latents"] for batch in batches]).equal(
            torch.stack([item["latents"] for item in items])
        )
        batch = batches[0]
        assert batch["text"].shape == (3, 512, 24) and batch["mask"].shape == (3, 512)
        for index in range(3):
            length = len(items[index]["text"])
            assert batch["mask"][index].sum() == length
            assert batch["text"][index, :length].equal(items[index]["text"])
            assert not batch["text"][index, length:].any()
        assert batch["prompts"] == [item["prompt"] for item in items[:3]]


def test_held_out_items_are_a_split_of_their_own(built: Project, tmp_path: Path) -> None:
    project = built.copy(tmp_path / "project")
    manifest = project / f"runs/{RUN}/manifest.jsonl"
    listed = project.manifest(RUN)
    listed[1]["validation"] = True
    listed[0]["repeats"] = 3
    listed.append({"dataset": "films", "stem": "x", "source": "x.mp4", "aside": "is broken"})
    manifest.write_text("".join(f"{json.dumps(row)}\n" for row in listed))
    held_out = CachedClipDataset(manifest, split="validation")
    assert {held_out[index]["prompt"] for index in range(len(held_out))} == {"a storm"}
    rest = CachedClipDataset(manifest)
    prompts = [rest[index]["prompt"] for index in range(len(rest))]
    assert prompts == ["a calm sea"] * 6 + ["wind in the trees"] * 2
    assert len(CachedClipDataset(manifest, split="all")) == 10
    listed[1]["validation"] = False
    with pytest.raises(UserError, match="has no item of split='train' and resolution='64'; see"):
        CachedClipDataset(manifest, resolution="64")
    manifest.write_text("{}\n")
    with pytest.raises(UserError, match="line 1 of the manifest is damaged; run"):
        CachedClipDataset(manifest)
    with pytest.raises(UserError, match="cannot be read; run the build's command"):
        CachedClipDataset(project / "runs/other/manifest.jsonl")


def test_the_loop_of_the_documentation_trains_a_lora(
    built: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs/trainers/wan.md").read_text(encoding="utf-8")
    section = text.partition("## Train with your own loop")[2].partition("\n## ")[0]
    (code,) = [
        each for each in re.findall(r"```python\n(.*?)```", section, re.S) if "STEPS" in each
    ]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=24, freq_dim=16, ffn_dim=32,
        num_layers=1, in_channels=16, out_channels=16,
    ).save_pretrained("model/transformer")  # fmt: skip
    for name, value in {"MODEL": "model", "RUN": str(built / f"runs/{RUN}")}.items():
        code = code.replace(re.search(rf'"{DOCUMENTED[name]}"', code)[0], repr(value))
    code = code.replace("STEPS, SHIFT = 1000", "STEPS, SHIFT = 8").replace("lr=1e-4", "lr=1e-2")
    exec(compile(code, "docs/trainers/wan.md", "exec"), {"__name__": "__main__"})
    losses = [float(each) for each in re.findall(r"loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == 8 and all(0 < loss < 100 for loss in losses)
    (file,) = (tmp_path / "lora").iterdir()
    written = load_file(file)
    trained = [value for name, value in written.items() if ".lora_B." in name]
    assert len(trained) == 8 and all(value.any() for value in trained)


# -- estimates ------------------------------------------------------------------------------------


def test_what_cannot_fit_the_disk_is_refused_before_any_job(
    template: Project, tmp_path: Path
) -> None:
    project = template.copy(tmp_path / "project")
    with Memo(project / MEMO) as memo:
        learn_job(memo, "latents wan", Past(1, 1.0, size=1e13))
    words = ("TB of latents of wan", "must be written, but only", "is free; free some space")
    result = project.run(f"caches_{RUN}", check=False)
    assert result.returncode != 0 and not result.jobs and not project.cache_files()
    assert result.one_line(*words).startswith("error: cache: ")
    dry = project.run(f"caches_{RUN}", "-n", "-p")
    assert dry.one_line(*words).startswith("warning: cache: ") and dry.jobs
    result = project.ask("check", RUN, check=False)
    assert result.returncode == 1
    result.one_line("disk ", "failed", *words)
    result.one_line("to encode", "latents of wan: about ", " TB")
    video_world.write_video(project / "data/films/long.mp4", "mpeg4", 500)
    (project / "data/films/long.txt").write_text("a long film\n")
    enlarged = {"frame_extraction": "slide", "target_frames": 81, "sample_stride": 1}
    project.configure(lambda values: values["datasets"]["films"].update(enlarged))
    project.configure(lambda values: values["runs"][RUN].update(resolutions=[8192]))
    result = project.run(f"clips_{RUN}", check=False)
    assert result.returncode != 0 and not (project / "clips").exists()
    result.one_line("error: ", "TB of clips must be written, but only")
