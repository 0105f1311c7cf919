"""Estimates of caches are the bytes that the real encoders write; what has no room is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL
from latentmake import layouts
from latentmake.caches.encode import carry_out
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.config.weights import Weights
from latentmake.errors import StorageError
from latentmake.files.disk import Need, free, human, refuse, shortages
from latentmake.files.media import Media, probe_image
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo
from latentmake.index.rates import Work
from latentmake.layouts import size_of
from latentmake.models import recipe
from latentmake.plan.estimates import Estimates
from latentmake.plan.jobs import jobs_of
from latentmake.plan.orders import Target, WorkItem, WorkOrder
from order_world import put_image
from wan_world import tiny_wan_vae

BROKEN = Weights(path="vae")
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, half": {"dtype": "float16"},
    "wan": {"task": "t2v-1.3B"},
    "wan, image to video": {"task": "i2v-A14B", "vae_dtype": "float16"},
    "sdxl": {"architecture": "sdxl", "layout": "sdscripts", "dtype": "bfloat16"},
    "flux": {"architecture": "flux", "layout": "sdscripts"},
}


@pytest.fixture(scope="module")
def vaes(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Folders of a VAE of images, and of one of videos."""
    folder = tmp_path_factory.mktemp("vaes")
    torch.manual_seed(0)
    AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    ).save_pretrained(folder / "images")
    tiny_wan_vae().save_pretrained(folder / "videos")
    return {False: str(folder / "images"), True: str(folder / "videos")}


def order_of(vaes: dict[bool, str], **settings: Any) -> WorkOrder:
    data = Dataset(path="data", fit="bucket" if "task" in settings else "crop")
    texts = 2 if settings.get("architecture") else 1
    vae = vaes["task" in settings]
    model = Model.model_validate({"vae": vae, "text": ["text"] * texts, **settings})
    layout = layouts.of(model.layout_name)
    items = []
    for stem, size in {"a": (96, 96), "b": (64, 128)}.items():
        source = put_image(Path(f"data/{stem}.png"), (9, 99, 199), size)
        media = probe_image(str(source))
        targets = []
        for part in ("64", "64x128"):
            (named,) = layout.named(f"cache/{part}", part, stem, media, data)
            targets.append(Target(part, named.path, None, size_of(part)))
        items.append(WorkItem(stem, str(source), None, tuple(targets), media=media))
    return WorkOrder(
        kind="latents",
        dataset="data",
        model="tiny",
        dataset_settings=data,
        model_settings=model,
        recipe=recipe.make("latents", data, model),
        items=tuple(items),
    )


@pytest.mark.parametrize("name", MODELS)
def test_estimated_bytes_are_those_of_the_caches(
    name: str, vaes: dict[bool, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    order = order_of(vaes, **MODELS[name])
    (need,) = Estimates(Memo(None), jobs_of([(order, [])], 1)).needs([order])
    carry_out(order, order.receipt, say=lambda line: None)
    written = sum(Path(path).stat().st_size for path in order.paths)
    exact = order.model_settings.spec.video
    assert need.size == (written if exact else pytest.approx(written, rel=0.01))


def test_what_a_job_will_name_stops_no_estimate(
    vaes: dict[bool, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    order = order_of(vaes, **MODELS["flux"])
    first = order.items[0]._replace(media=Media(60_000, 1, 0))  # too narrow
    narrow = replace(order, items=(first, *order.items[1:]))
    (line,) = Estimates(Memo(None), jobs_of([(narrow, [])], 1)).lines()
    assert line.startswith("latents of tiny: 4 images of ")
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text("{")
    broken = replace(order, model_settings=order.model_settings.model_copy(update={"vae": BROKEN}))
    assert not Estimates(Memo(None), jobs_of([(broken, [])], 1)).lines()


def test_time_is_that_of_past_jobs_and_before_them_a_guess_by_size(
    vaes: dict[bool, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    order, memo = order_of(vaes), Memo(None)
    (line,) = Estimates(memo, jobs_of([(order, [])], 1)).lines()
    assert re.search(
        r"latents of tiny: 4 images of up to 128 x 64, .* if it does \S+ TFLOP/s$", line
    )
    memo.learn_rate(order.work, Work(2, 360.0, 60.0))
    memo.save()
    (line,) = Estimates(memo, jobs_of([(order, [])], 1)).lines()
    assert line.endswith("; about 13 min at the rate measured here")
    assert not Estimates(memo, []).lines()


def test_of_caches_in_shapes_of_other_scripts_the_number_and_time_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memo = Memo(None)
    for kind in ("latents", "text"):
        memo.learn_rate(f"{kind} tiny", Work(2, 360.0, 60.0))
    memo.save()
    values = {"vae": "vae", "text": ["text"], "task": "edit-2509", "dit": "dit"}
    model = Model.model_validate({**values, "architecture": "qwen_image_edit"})
    sizes = [Size(64, 64), Size(96, 96)]
    beside = tuple(Target(f"text@{size.width}", "x", None, size) for size in sizes)
    alike = tuple(target._replace(size=None) for target in beside)
    media = Media(64, 48, 0)
    for kind, targets, said in (
        ("text", beside, "text of tiny: 2 captions, size unknown"),
        ("text", alike, "text of tiny: 1 caption, size unknown"),
        ("latents", beside, "latents of tiny: 2 images of up to 80 x 112, size unknown"),
    ):
        item = WorkItem("a", None, "a cat", targets, media=media)
        settings = Dataset(path="data", fit="bucket")
        order = WorkOrder(kind, "data", "tiny", settings, model, {"format": 1}, (item,))
        (line,) = Estimates(memo, jobs_of([(order, [])], 1)).lines()
        assert line.startswith(said)


def test_what_has_no_room_is_one_line_a_disk(tmp_path: Path) -> None:
    there = free(tmp_path / "not" / "made" / "yet")
    half = Need("latents of wan", str(tmp_path / "cache"), there * 6 // 10)
    assert not list(shortages([half]))
    both = [half, half._replace(what="clips", folder=str(tmp_path / "clips"))]
    with pytest.raises(StorageError) as caught:
        refuse(both)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path}/cache: {human(half.size)} of latents of wan, ")
    assert "of clips must be written, but only" in line and "; free some space" in line
    assert not (tmp_path / "not").exists()
    assert not list(shortages([Need("nothing", "cache", 0)]))


def test_bytes_for_people() -> None:
    sizes = (999, 250_000, 4_190_000, 503_000_000, 4.137e11, 1.2e12)
    named = ["1.0 kB", "0.2 MB", "4.2 MB", "0.5 GB", "413.7 GB", "1.2 TB"]
    assert [*map(human, sizes)] == named
