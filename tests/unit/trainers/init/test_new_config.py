"""The model's section that `latentmake init` writes: a dtype that weights and GPUs suggest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from latentmake.base.errors import StorageError
from latentmake.config.architectures import ARCHITECTURES
from latentmake.config.root import parse
from latentmake.formats.safetensors import Tensor
from latentmake.trainers.init.init import init
from latentmake.trainers.init.local_models import Model, Part, model_at
from latentmake.trainers.init.new_config import dtype_of
from PIL import Image
from safetensors.torch import save_file

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = str(Path(__file__).resolve().parents[4] / "data/tiny-sd")


@pytest.mark.parametrize(
    ("kind", "weights", "capabilities", "dtype"),
    [
        ("sd", "F32", "", "float16"),
        ("sd", "F16", "", "bfloat16"),
        ("sd", "BF16", "", "bfloat16"),
        ("sd", "F32", "8.0", "bfloat16"),
        ("sd", "F32", "9.0\n7.5", "float16"),
        ("sdscripts", "F32", "", "bfloat16"),
    ],
)
def test_the_dtype_of_new_caches_is_that_of_the_weights_or_the_gpus(
    kind: str,
    weights: str,
    capabilities: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    network = Part(tmp_path, tmp_path, {"conv_in.weight": Tensor(weights, (1,), 0, 4)})
    model = Model(ARCHITECTURES["sd1"], None, [network], [], tmp_path, "one", kind=kind)
    model.network = network
    assert dtype_of(model) == dtype


@pytest.mark.parametrize("shards", [(".fp16",), (".fp16-00001-of-00002", ".fp16-00002-of-00002")])
def test_a_network_of_one_variant_is_found(tmp_path: Path, shards: tuple[str, ...]) -> None:
    unet = tmp_path / "sd15/unet"
    unet.mkdir(parents=True)
    index = "diffusion_pytorch_model.safetensors.index.fp16.json"
    for each in ("config.json", *([index] if len(shards) > 1 else ())):
        (unet / each).write_text("{}")
    name = "down_blocks.{}.attentions.0.transformer_blocks.0.attn2.to_k.weight"
    for number, ending in enumerate(shards):
        file = unet / f"diffusion_pytorch_model{ending}.safetensors"
        save_file({name.format(number): torch.ones(32, 768)}, file)
    (network,) = model_at(tmp_path / "sd15").networks
    assert (network.path, len(network.tensors)) == (unet, len(shards))
    save_file({name.format(5): torch.ones(32, 768)}, unet / "diffusion_pytorch_model.safetensors")
    (network,) = model_at(tmp_path / "sd15").networks
    assert [*network.tensors] == [name.format(5)]


def put(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (80, 64)).save(name, "PNG")


def test_names_that_yaml_or_a_path_reads_otherwise_are_kept() -> None:
    names = ["2024", "2024-05-17", "yes", "null", "0x1F", "1:30", "~x", "a$HOME", "a: #b", "- c"]
    names += [" d ", "1_2\n3", "hf:e"]
    put(*(f"{name}/a.png" for name in names))
    init([Path(name) for name in names], model=TINY, output=Path("c.yaml"))
    config = parse(yaml.safe_load(Path("c.yaml").read_text()))
    assert [Path(each.path) for each in config.datasets.values()] == [*map(Path, names)]
    words = [each.class_tokens for each in config.datasets.values()]
    assert words[:4] == names[:4] and words[-3:] == ["d", "1 2\n3", "hf:e"]
    assert [*config.runs] == ["2024"]


def test_a_configuration_with_a_line_break_in_its_name_is_refused() -> None:
    put("cats/a.png")
    with pytest.raises(StorageError, match="cannot have this name"):
        init([Path("cats")], model=TINY, output=Path("a\nb.yaml"))


def test_repeats_with_zeros_before_them_are_read_as_sdscripts_reads_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    put("img/003_cat/a.png", "img/10_cat/b.png", "img/000_dog/c.png")
    init([Path("img")], model=TINY)
    made = parse(yaml.safe_load(Path("cat.yaml").read_text())).datasets
    assert {(name, each.path, each.num_repeats) for name, each in made.items()} == {
        ("cat_1", "img/003_cat", 3),
        ("cat_2", "img/10_cat", 10),
    }
    assert "img/000_dog: left out" in capsys.readouterr().out


def test_what_is_left_out_is_named_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    put("img/10_cat/a.png", "img/10_cat/a-masklabel.png", "img/more/b.png", "img/c.png")
    put("img/5_dog/d.HEIC", "img/.git/e.png", "up/a.png", "up/b.png")
    Path("img/log").mkdir()
    for name in ("up/a.TXT", "up/b.TXT", "up/b.caption"):
        Path(name).write_text("a lamp")
    init([Path("img"), Path("up")], model=TINY)
    notes = [line[9:] for line in capsys.readouterr().out.splitlines() if line[:4] == "note"]
    assert "img/10_cat: a network can write its captions: uncomment the captioner in" in notes.pop(
        0
    )
    assert notes == [
        "img/10_cat: 1 file is not read: 1 -masklabel.png (masks, which are not used)",
        "img/5_dog: left out, 1 file is not read: 1 .HEIC (convert to PNG or JPEG)",
        "img/log: left out, it holds neither images nor videos",
        "img/more: left out, its name begins with no number of repeats, as kohya's do that are "
        "beside it",
        "img: left out 1 file beside kohya's folders",
        "up: 1 file is not read: 1 .caption (captions: see caption_extension)",
    ]
    (cat, up) = parse(yaml.safe_load(Path("cat.yaml").read_text())).datasets.values()
    assert (cat.num_repeats, up.caption_extension, up.class_tokens) == (10, ".TXT", None)
