"""The checklist finds before the training what would end or spoil it."""

from __future__ import annotations

import io
import json
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from latentmake.base.errors import TrainingError
from latentmake.config.models import Model
from latentmake.models.headers import kinds_of, tensors_of, weight_file
from latentmake.models.inspection import encoder_fault
from latentmake.runs.findings import Finding, checklist, failed, refuse_failed
from latentmake.trainers.musubi.backend import Musubi
from latentmake.trainers.musubi.checks import model_files
from latentmake.trainers.musubi.order import MusubiOrder
from musubi_world import (
    RUN,
    WAN_DIT,
    make_run,
    put_latents,
    put_text,
    put_weights,
    stand_in,
)
from PIL import Image
from safetensors.torch import save_file

CACHE = f"cache/{RUN}/wan/64"


@pytest.fixture
def tuner(tmp_path: Path) -> Path:
    return stand_in(tmp_path / "tuner")


def check(order: MusubiOrder) -> list[Finding]:
    return [*Musubi().data_findings(order), *Musubi().preflight(order)]


def kind_of(path: Path) -> str:
    return next(iter(kinds_of(tensors_of(path)).values()))


def of(findings: list[Finding], what: str) -> Finding:
    (found,) = [finding for finding in findings if finding.what == what]
    return found


def fails(order: MusubiOrder, what: str) -> str:
    """Return the note of the one line that has failed."""
    findings = check(order)
    assert [each.what for each in findings if each.verdict == "failed"] == [what]
    with pytest.raises(TrainingError, match="1 failed in the checklist"):
        refuse_failed(findings)
    return of(findings, what).note


def test_a_sound_run_fails_nowhere(working: Path, tuner: Path) -> None:
    findings = check(make_run(working, resolutions=((64, 64), (32, 64)), tuner=tuner))
    assert not failed(findings)
    refuse_failed(findings)
    assert of(findings, "images and captions").note.startswith("3 items")
    assert of(findings, "cache folders").note.startswith("2 folders")
    assert of(findings, "model: dit").note.endswith("Wan DiT")
    assert of(findings, "attention").note == "sdpa"
    table = checklist(findings)
    assert all(each.what in table and each.verdict in table for each in findings)


# -- what is trained on ------------------------------------------------------------------------


def test_a_run_whose_items_were_all_skipped_fails(working: Path, tuner: Path) -> None:
    order = make_run(working, tuner=tuner)
    row = {"dataset": "a", "stem": "b", "source": "c", "aside": "damaged"}
    Path(order.manifest).write_text(f"{json.dumps(row)}\n")
    assert of(check(order), "images and captions").note == "no item is left to train on"


def test_latents_that_the_manifest_does_not_name_fail(working: Path, tuner: Path) -> None:
    order = make_run(working, tuner=tuner)
    put_text(Path(f"{CACHE}/old_wan_te.safetensors"), "harmless alone")
    assert not failed(check(order))
    stray = f"{CACHE}/old_0080x0064_wan.safetensors"
    put_latents(Path(stray), size=(80, 64), latent=(1, 8, 8))
    assert fails(order, "foreign caches").startswith(f"{stray} is not in the manifest")


def test_a_project_in_whose_caches_musubi_tuner_finds_nothing_is_refused(
    tmp_path: Path, tuner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "loras [2024]"
    place.mkdir()
    monkeypatch.chdir(place)
    note = fails(make_run(place, tuner=tuner), "cache folders")
    assert note.startswith(f"{place}/{CACHE} has one of [ ] * ? in it")


DEEP = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
TURNED = Image.Exif()
TURNED[0x0112] = 6


@pytest.mark.parametrize(
    ("image", "what", "note"),
    [
        (Image.new("RGBA", (80, 64)), "transparency", "1 image has an alpha channel, which"),
        (
            Image.fromarray(DEEP),
            "16-bit images",
            "1 image is 16-bit greyscale, of which nearly every pixel becomes white: "
            f"data/{RUN}/red.png; save with 8 bits",
        ),
        (Image.new("RGB", (80, 64)), "EXIF orientation", "1 images"),
    ],
    ids=["transparent", "of 16 bits", "turned"],
)
def test_images_that_it_reads_otherwise_are_counted(
    working: Path, tuner: Path, image: Image.Image, what: str, note: str
) -> None:
    order = make_run(working, tuner=tuner)
    assert not [each for each in check(order) if each.what == what]
    image.save(f"data/{RUN}/red.png", exif=TURNED if what.startswith("EXIF") else b"")
    found = of(check(order), what)
    assert found.verdict == "warning" and found.note.startswith(note)


# -- what is trained ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["dit_high_noise", "vae"])
def test_each_model_path_must_exist(working: Path, tuner: Path, key: str) -> None:
    task = "t2v-A14B" if key == "dit_high_noise" else "t2v-1.3B"
    order = make_run(working, tuner=tuner, model={"task": task, key: "models/gone.safetensors"})
    found = Finding(f"model: {key}", "failed", "models/gone.safetensors: does not exist")
    assert of(check(order), f"model: {key}") == found


def test_each_form_of_the_encoders_is_known(tmp_path: Path) -> None:
    from wan_world import write_clip_vision, write_umt5, write_wan_vae

    for write, kind in (
        (write_wan_vae, "Wan VAE"),
        (write_umt5, "T5"),
        (write_clip_vision, "image encoder"),
    ):
        for form, path in write(tmp_path).items():
            if form != "tokenizer":
                assert kind_of(weight_file(path)) == kind, path


@pytest.mark.parametrize("old", [False, True])
def test_a_torch_file_is_known_by_its_names(tmp_path: Path, old: bool) -> None:
    path = tmp_path / "t5.pth"
    weights = {"token_embedding.weight": torch.ones(3, 2), "blocks.0.attn.q.weight": torch.ones(2)}
    torch.save(weights, path, _use_new_zipfile_serialization=not old)
    assert kind_of(path) == "T5"


def test_a_pickle_is_read_but_never_carried_out(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return exec, (f"open({str(tmp_path / 'harm')!r}, 'w')",)

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"visual.patch_embedding": Harmful()}))
    path = tmp_path / "clip.pth"
    path.write_bytes(stream.getvalue())
    assert kind_of(path) == "image encoder"
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("width", "note"),
    [(5120, "is a Wan DiT of width 5120; t2v-1.3B has 1536"), (1536, "Wan DiT"), (32, "Wan DiT")],
)
def test_the_dit_of_another_task_is_known_by_its_width(
    working: Path, tuner: Path, width: int, note: str
) -> None:
    order = make_run(working, tuner=tuner)
    header = {name: torch.ones(2, 2) for name in WAN_DIT}
    header["patch_embedding.weight"] = torch.zeros(width, 16, 1, 2, 2, dtype=torch.bfloat16)
    save_file(header, "models/dit.safetensors")
    found = of(check(order), "model: dit")
    assert found.note.endswith(note)
    assert found.verdict == ("ok" if note == "Wan DiT" else "failed")


def test_another_number_format_than_the_weights_fails(working: Path, tuner: Path) -> None:
    order = make_run(working, tuner=tuner)
    put_weights(Path("models/dit.safetensors"), "blocks.0.cross_attn.k.weight", dtype=torch.float16)
    assert "mixed_precision: fp16" in fails(order, "mixed precision")
    right = order.trainer.model_copy(update={"mixed_precision": "fp16"})
    assert not failed(check(order.model_copy(update={"trainer": right})))


# -- what trains -------------------------------------------------------------------------------


def test_a_trainer_that_is_not_there_fails(working: Path, tmp_path: Path) -> None:
    assert "set `musubi_tuner.path`" in fails(make_run(working), "musubi-tuner")
    assert "does not exist" in fails(make_run(working, tuner=tmp_path / "gone"), "musubi-tuner")
    note = fails(make_run(working, tuner=working), "musubi-tuner")
    assert re.search(r"wan_train_network\.py.*a musubi-tuner that knows Wan, or update it", note)


def test_a_trainer_too_old_for_a_flag_fails(working: Path, tmp_path: Path) -> None:
    old = stand_in(tmp_path / "old", without=("resume", "timestep_sampling", "dit_high_noise"))
    note = fails(make_run(working, tuner=old, save_every_n_epochs=1), "arguments")
    assert note.startswith("this musubi-tuner does not know --timestep_sampling --resume: update")
    assert "--resume" not in fails(make_run(working, tuner=old), "arguments")
    order = make_run(working, tuner=old, timestep_sampling=None, arguments=["--unheard_of=1"])
    assert "does not know --unheard_of: update" in fails(order, "arguments")
    order = make_run(working, tuner=old, timestep_sampling=None, arguments=["--fp8_bas"])
    assert fails(order, "arguments").endswith("does not know --fp8_bas: did you mean --fp8_base?")


@pytest.mark.parametrize(
    ("settings", "what", "note"),
    [
        ({"optimizer_type": "AdamW8bit"}, "environment", "lacks bitsandbytes"),
        ({"attention": "xformers"}, "attention", "lacks xformers: install it there"),
        (
            {"network_module": "networks.lokr"},
            "network_module",
            "has networks.lokr: did you mean networks.loha?",
        ),
        (
            {"accelerate_config": "none.yaml"},
            "accelerate_config",
            "none.yaml does not exist: correct",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_a_training_needs_and_is_not_there_fails(
    working: Path, tuner: Path, settings: dict[str, Any], what: str, note: str
) -> None:
    assert note in fails(make_run(working, tuner=tuner, **settings), what)


def test_an_environment_that_lacks_an_import_fails(working: Path, tuner: Path) -> None:
    assert not failed(check(make_run(working, tuner=tuner, network_module="networks.loha")))
    script = tuner / "wan_train_network.py"
    script.write_text("import torch\nimport toml\n" + script.read_text())
    note = fails(make_run(working, tuner=tuner), "environment")
    assert "lacks toml, torch: install" in note


def test_encoders_in_other_names_fail_only_where_its_own_scripts_load_them(
    working: Path, tuner: Path
) -> None:
    order = make_run(working, tuner=tuner)
    put_weights(Path("models/vae.safetensors"), "encoder.conv_in.weight", "decoder.conv_in.weight")
    put_weights(Path("models/t5.safetensors"), "shared.weight", "encoder.block.0.x")
    findings = check(order)
    assert not failed(findings)
    assert of(findings, "model: text").verdict == "ok"
    own = order.model.model_copy(update={"encoder": "musubi"})
    scripted = {file.key: file.fault for file in model_files(own)}
    assert "diffusers' names" in scripted["vae"] and "transformers' names" in scripted["text"]
    assert encoder_fault(own, "latents") == ("vae", f"models/vae.safetensors: {scripted['vae']}")
    assert encoder_fault(order.model, "latents") is None


def test_a_model_on_the_hub_is_not_looked_at(working: Path, tuner: Path) -> None:
    hub = {"vae": {"hub": "someone/wan", "revision": "a" * 40}}
    order = make_run(working, tuner=tuner)
    section = order.model.model_dump() | hub
    order = order.model_copy(update={"model": Model.model_validate(section)})
    assert of(check(order), "model: vae").verdict == "warning"
