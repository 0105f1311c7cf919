"""Cache files are those that sd-scripts would have written, by a second reading and by its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from item_world import work_of
from latentmake.config.datasets import Dataset
from latentmake.config.models import Model
from latentmake.encode.encoders.sdscripts import file_bytes, text_arrays
from latentmake.formats import cachefile
from latentmake.formats.media import probe_image
from latentmake.geometry.buckets import Size
from latentmake.geometry.clips import Media
from latentmake.layouts.layout import SdScripts, layout_of
from latentmake.models import cache_recipe
from latentmake.plan.orders import Order, Target
from order_world import carry_out, silent
from PIL import Image
from sdscripts_world import latents_fault, read, text_fault, tiny_vae

ARCHITECTURES = ("sd1", "sd2", "sdxl", "sd3", "flux")
ENCODERS = {"sd1": 1, "sd2": 1, "sdxl": 2, "sd3": 3, "flux": 2}
SIZES = {"wide": (400, 120), "same": (64, 64), "tall": (40, 90), "large": (300, 310)}
PLACES = {"wide": (192, 64), "same": (128, 128), "tall": (64, 192), "large": (128, 128)}
BUCKETS = {"fit": "bucket", "bucket_reso_steps": 64, "min_bucket_reso": 64}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    Path("data/sub").mkdir(parents=True)
    for stem, (width, height) in SIZES.items():
        pixels = generator.integers(0, 256, (height, width, 4), dtype=np.uint8)
        Image.fromarray(pixels).save(f"data/sub/{stem}.png")


def model(architecture: str, **settings: Any) -> Model:
    text = [f"text_{number}" for number in range(ENCODERS[architecture])]
    values = {"vae": "vae", "text": text, "architecture": architecture, "layout": "sdscripts"}
    return Model.model_validate(values | settings)


def order(which: Model, resolution: str = "128", **dataset: Any) -> Order:
    settings = Dataset.model_validate({"path": "data", **BUCKETS, **dataset})
    layout = layout_of(which.layout_name)
    folder = layout.folder("shapes", "tiny", resolution)
    side = int(resolution)
    items = []
    for stem in SIZES:
        path = f"data/sub/{stem}.png"
        media = probe_image(path)
        ((name, _),) = layout.named(folder, resolution, f"sub/{stem}", media, settings)
        target = Target(resolution, name, None, Size(side, side))
        items.append(work_of(f"sub/{stem}", path, None, (target,), media=media))
    made = cache_recipe.make("latents", settings, which)
    return Order("latents", "shapes", "tiny", settings, which, made, tuple(items))


def made(which: Model, **dataset: Any) -> dict[str, Path]:
    """Encode the pictures with a real VAE; return stem -> cache file."""
    channels = 16 if which.architecture in ("sd3", "flux") else 4
    if not Path("vae").exists():
        tiny_vae(channels).save_pretrained("vae")
    work = order(which, **dataset)
    carry_out(work, say=silent)
    return {x.item.stem.removeprefix("sub/"): Path(x.targets[0].path) for x in work.items}


@pytest.mark.parametrize(
    ("architecture", "latents", "text"),
    [
        ("sd1", "sub/a_0200x0120_sd.npz", None),
        ("sd2", "sub/a_0200x0120_sd.npz", None),
        ("sdxl", "sub/a_0200x0120_sdxl.npz", "sub/a_te_outputs.npz"),
        ("sd3", "sub/a_0200x0120_sd3.npz", "sub/a_sd3_te.npz"),
        ("flux", "sub/a_0200x0120_flux.npz", "sub/a_flux_te.npz"),
        ("lumina", "sub/a_0200x0120_lumina.npz", "sub/a_lumina_te.npz"),
        ("hunyuan_image", "sub/a_0200x0120_hi.npz", "sub/a_hi_te.npz"),
        ("anima", "sub/a_0200x0120_anima.npz", "sub/a_anima_te.npz"),
    ],
)
def test_names_are_those_of_sd_scripts_and_lead_back_to_their_items(
    architecture: str, latents: str, text: str | None
) -> None:
    layout = SdScripts(architecture)
    ((path, _),) = layout.named("cache/d/m/64", "64", "sub/a", Media(200, 120, 0), None)
    assert path == f"cache/d/m/64/{latents}"
    assert layout.owners(latents) == ("sub/a",)
    assert layout.parts(["64", "96"]) == ["64", "96", *(["text"] if text else [])]
    assert layout.owners("sub/a.npz") == () == layout.owners("sub/a.latents.safetensors")
    if text is not None:
        ((path, _),) = layout.named("cache/d/m/text", "text", "sub/a", None, None)
        assert path == f"cache/d/m/text/{text}"
        assert layout.owners(text) == ("sub/a",)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("augmented", [False, True])
def test_latents_are_what_sd_scripts_would_train_on(architecture: str, augmented: bool) -> None:
    files = made(model(architecture), flip_aug=augmented, alpha_mask=augmented)
    for stem, path in files.items():
        fault = latents_fault(
            path, architecture, PLACES[stem], SIZES[stem], flip_aug=augmented, alpha_mask=augmented
        )
        assert fault is None, (stem, fault)
        cachefile.read_header(path)


def test_an_image_that_grows_is_scaled_by_pillow_with_its_transparency() -> None:
    path = made(model("sd1"), alpha_mask=True)["tall"]
    # 40 x 90 goes to 64 x 192, which 85 x 192 covers.
    image = Image.open("data/sub/tall.png").resize((85, 192), Image.Resampling.LANCZOS)
    pixels = np.array(image)[:, 10:74]
    found = read(path)
    assert np.array_equal(found["alpha_mask"], pixels[:, :, 3].astype(np.float32) / 255)
    tensor = torch.from_numpy(pixels[:, :, :3].copy()).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.inference_mode():
        expected = tiny_vae().encode(tensor).latent_dist.mean[0]
    assert np.allclose(found["latents"], expected.numpy(), atol=1e-5)


def test_mirrored_latents_are_those_of_the_mirrored_image() -> None:
    made_ = made(model("sd1"), flip_aug=True)
    flipped = {stem: read(path)["latents_flipped"] for stem, path in made_.items()}
    for stem in SIZES:
        image = Image.open(f"data/sub/{stem}.png")
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(f"data/sub/{stem}.png")
    again = {stem: read(path)["latents"] for stem, path in made(model("sd1")).items()}
    same = np.allclose(flipped["same"], again["same"], atol=1e-4)
    assert same and not np.allclose(flipped["same"], read(made_["same"])["latents"][:, :, ::-1])


def test_flux_alone_keeps_latents_scaled_whatever_the_configuration_says() -> None:
    flux = read(made(model("flux"))["same"])["latents_16x16"]
    three = read(made(model("sd3"))["same"])["latents_16x16"]
    assert np.allclose(flux, (three - 0.1159) * 0.3611, atol=1e-6)


def test_an_image_is_neither_turned_nor_seen_through() -> None:
    image = Image.open("data/sub/same.png")
    before = read(made(model("sd1"))["same"])["latents"]
    exif = Image.Exif()
    exif[274] = 6
    pixels = np.array(image)
    pixels[:, :, 3] = 0
    Image.fromarray(pixels).save("data/sub/same.png", exif=exif)
    assert np.array_equal(read(made(model("sd1"))["same"])["latents"], before)


def tensors(architecture: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    names = ("text_encoder", "text_encoder_2", "text_encoder_3")[: ENCODERS[architecture]]
    widths, found = (8, 12, 20), {}
    for index, name in enumerate(names):
        t5 = architecture in MULTIPLE and name == names[-1]
        length, width = (16, 20) if t5 else (77, widths[index])
        found[f"{name}.hidden_state"] = torch.randn(length, width).to(dtype)
        found[f"{name}.attention_mask"] = (torch.arange(length) < 5).long()
        if not t5:
            found[f"{name}.pooled"] = torch.randn(width).to(dtype)
    return found


MULTIPLE = ("sd3", "flux")


@pytest.mark.parametrize("architecture", ["sdxl", "sd3", "flux"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_text_is_what_sd_scripts_would_train_on(
    architecture: str, dtype: torch.dtype, masked: bool
) -> None:
    masks = {"sdxl": (), "sd3": ("lg", "t5"), "flux": ("t5",)}[architecture]
    which = model(architecture, **{f"apply_{each}_attn_mask": masked for each in masks})
    given = tensors(architecture, dtype)
    path = Path("text.npz")
    path.write_bytes(file_bytes("text", which, given, {}))
    assert text_fault(path, architecture, lg_mask=masked, t5_mask=masked) is None
    arrays = text_arrays(which, given)
    if architecture == "sd3":
        assert arrays["lg_out"].shape == (77, 20) and arrays["lg_pooled"].shape == (20,)
        both = torch.cat([given["text_encoder.pooled"], given["text_encoder_2.pooled"]]).float()
        assert np.array_equal(arrays["lg_pooled"].astype(np.float32), both.numpy())
    if architecture == "sdxl":
        pooled = given["text_encoder_2.pooled"].float().numpy()
        assert np.array_equal(arrays["pool2"].astype(np.float32), pooled)
