"""Caches of ai-training become ours where they are what we would make, and ours become theirs."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from latentmake import digest
from latentmake.caches.pixels import plain
from latentmake.config.datasets import Dataset
from latentmake.config.root import parse
from latentmake.errors import ConfigError
from latentmake.exchange.adoption import STATES, adopt
from latentmake.exchange.ai_training import AiTraining, plan_adopt
from latentmake.exchange.export import ExportOrder, export, plan_export
from latentmake.files import cachefile
from latentmake.geometry.buckets import Size
from latentmake.index.memo import Memo
from latentmake.layouts.layout import layout_of
from latentmake.models.shapes import Latents, Text, Tokens
from latentmake.plan.facts import Facts
from latentmake.plan.orders import Order
from order_world import order, put_image, silent, target
from safetensors.torch import load_file
from xxhash import xxh3_128_hexdigest

LATENTS, T5, CLIP = ".img_sdxl", ".txt_t5cache", ".txt_clipl"
CAPTION = "a cat on a mat"
TEXTS = {T5: Text(ending=T5, tokens=Tokens(6, padded=False), width=8)}
TEXTS[CLIP] = Text(ending=CLIP, tokens=Tokens(5, padded=True), width=8)
DTYPES = {LATENTS: "F32", T5: "BF16", CLIP: "F32"}
NAMES = {LATENTS: "latent", T5: "emb", CLIP: "emb"}
# Each example has the same folder to itself: what an earlier one left there is removed by the next.
SHARED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def safetensors(**tensors: tuple[str, list[int], bytes]) -> bytes:
    """Return a safetensors file of (dtype, shape, bytes) by name, without any metadata."""
    header: dict[str, Any] = {}
    body = b""
    for name, (dtype, shape, data) in tensors.items():
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def content(ending: str, shape: list[int], value: float = 1.5, dtype: str = "") -> bytes:
    """Return a sound file of one value, but for the number format where one is given."""
    dtype = dtype or DTYPES[ending]
    one = struct.pack("<f", value)
    one = one if dtype == "F32" else one[2:]  # bfloat16 is float32 without its lower half
    return safetensors(**{NAMES[ending]: (dtype, shape, one * int(np.prod(shape)))})


def image(stem: str = "a", size: tuple[int, int] = (20, 16)) -> Order:
    """Return the order for the latents of one image."""
    return order("latents", {stem: put_image(Path(f"data/{stem}.png"), (1, 2, 3), size)})


def caption(stem: str = "a", text: str = CAPTION) -> Order:
    """Return the order for the embedding of one caption."""
    path = Path(f"data/{stem}.txt")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return order("text", {stem: path})


def put(ending: str, data: bytes, stem: str = "a") -> Path:
    path = Path(f"data/{stem}{ending}")
    path.write_bytes(data)
    return path


def run(
    *works: Order, texts: tuple[str, ...] = (T5,), say: Callable[[str], None] = silent
) -> list[int]:
    """Adopt what some orders ask for; return how many targets are in which state."""
    form = AiTraining(
        roots={"cats": "data"},
        ending=LATENTS,
        latents=Latents(4, 8, 0.13025, 0.0),
        texts=[TEXTS[ending] for ending in texts],
        sizes=[Size(16, 16)],
    )
    counts = adopt(works, form, say=say)
    return [counts[state] for state in STATES]


def write_out(
    texts: tuple[str, ...] = (T5,), say: Callable[[str], None] = silent, **changes: Any
) -> list[int]:
    """Export the one item `a`; return how many files were written, kept and left."""
    row = {
        "dataset": "cats",
        "stem": "a",
        "source": "data/a.png",
        "latents": {"16": cache("16")},
        "text": cache("text"),
    }
    aside = {"dataset": "cats", "stem": "b", "source": "data/b.png", "aside": "is damaged"}
    Path("manifest.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(aside)}\n")
    values: dict[str, Any] = {
        "run": "cats",
        "manifest": "manifest.jsonl",
        "folder": "out",
        "part": "16",
        "ending": LATENTS,
        "texts": [(TEXTS[each].ending, TEXTS[each].tokens.padded) for each in texts],
        "overwrite": False,
    }
    counts = export(ExportOrder(**values | changes), say=say)
    return list(counts.values())


def cache(part: str) -> str:
    return target("a", part).path


def body(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return what a safetensors file says of its tensors, and their bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, data[8 + length :]


# -- what comes of it -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finite() -> Callable[[bytes, str], bool]:
    def check(data: bytes, dtype: str) -> bool:
        values = np.frombuffer(data, "<u4") if dtype == "F32" else np.frombuffer(data, "<u2")
        values = values.astype(np.uint32) << (0 if dtype == "F32" else 16)
        numbers = values.view(np.float32)
        return bool(np.isfinite(numbers).all() and numbers.any())

    return check


@SHARED
@given(latents=st.binary(min_size=64, max_size=64), tokens=st.integers(1, 6), data=st.data())
def test_adopted_and_exported_tensors_keep_their_bytes(
    finite: Callable[[bytes, str], bool], latents: bytes, tokens: int, data: st.DataObject
) -> None:
    text = data.draw(st.binary(min_size=16 * tokens, max_size=16 * tokens))
    assume(finite(latents, "F32") and finite(text, "BF16"))
    for folder in ("cache", "out"):
        shutil.rmtree(folder, ignore_errors=True)
    works = image(), caption()
    files = {
        put(LATENTS, safetensors(latent=("F32", [4, 2, 2], latents))),
        put(T5, safetensors(emb=("BF16", [tokens, 8], text))),
    }
    assert run(*works) == [2, 0, 0, 0, 0]
    assert write_out() == [2]
    for path in files:
        assert body(Path(f"out/cats/{path.name}")) == body(path)


def test_a_cache_that_was_adopted_says_all_that_an_encoded_one_does_and_whence_it_is() -> None:
    latents, text = image(), caption(text=f"\n{CAPTION} \n")
    file = put(LATENTS, content(LATENTS, [4, 2, 2]))
    put(T5, content(T5, [3, 8]))
    run(latents, text)
    text_of_head = Path(cache("16")).read_bytes()[8:].split(b"}}", 1)[0]
    head = json.loads(text_of_head + b"}}")["__metadata__"]
    _, tensors = body(Path(cache("16")))
    assert head.pop("latentmake.header_checksum").startswith("xxh3_64:")
    source, recipe = digest.of_file(Path("data/a.png")), digest.of_value(latents.recipe)
    assert head == {
        "original_width": "20",
        "original_height": "16",
        "pixel_width": "16",
        "pixel_height": "16",
        "scaling_factor": "0.13025",
        "shift_factor": "0.0",
        "latentmake.adopted": digest.of_file(file),
        "latentmake.checksum": f"xxh3_128:{xxh3_128_hexdigest(tensors)}",
        "latentmake.key": cachefile.target_key(source, recipe, "20x16+2+0:16x16"),
        "latentmake.recipe": digest.canonical(latents.recipe),
        "latentmake.source": source,
    }
    assert b'"caption":"a cat on a mat"' in Path(cache("text")).read_bytes()
    (name,) = load_file(cache("text"))
    assert name == "text_encoder.hidden_state"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_adopted_tensors_have_the_number_format_of_the_model(dtype: str) -> None:
    work = image()
    put(LATENTS, content(LATENTS, [4, 2, 2], 1.2345678))
    assert run(dataclasses.replace(work, recipe={**work.recipe, "dtype": dtype}))[0] == 1
    (tensor,) = load_file(cache("16")).values()
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.eq(torch.tensor(1.2345678).to(tensor.dtype)).all()


def test_several_text_encoders_are_adopted_together_or_not_at_all() -> None:
    work = caption()
    t5 = put(T5, content(T5, [3, 8]))
    assert run(work, texts=(T5, CLIP)) == [0, 0, 1, 0, 0]
    clip = put(CLIP, content(CLIP, [5, 8], 2.0))
    assert run(work, texts=(T5, CLIP)) == [1, 0, 0, 0, 0]
    tensors = load_file(cache("text"))
    assert tensors["text_encoder.hidden_state"].shape == (3, 8)
    assert tensors["text_encoder_2.hidden_state"].shape == (5, 8)
    header = cachefile.read_header(cache("text"))
    assert header.adopted == f"{digest.of_file(t5)} {digest.of_file(clip)}"
    # The same files are what an export would write, though by another number format.
    run(image())
    assert write_out((T5, CLIP), folder=None, ending=None) == [2]


def test_an_item_without_a_caption_file_may_be_adopted() -> None:
    Path("data").mkdir()
    put(T5, content(T5, [1, 8]))
    assert run(order("text", {"a": ""})) == [1, 0, 0, 0, 0]


@SHARED
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.sampled_from(["crop", "bucket"]),
    st.booleans(),
)
def test_latents_fit_just_where_encoding_would_give_their_shape(
    size: tuple[int, int], fit: str, no_upscale: bool
) -> None:
    shutil.rmtree("cache", ignore_errors=True)
    settings_ = Dataset(path="data", fit=fit, bucket_no_upscale=no_upscale)
    placed = layout_of("plain").place(Size(*size), Size(16, 16), settings_)
    wanted = plain.fit(np.zeros((*size[::-1], 3), np.uint8), placed).shape
    work = order(
        "latents",
        {"a": put_image(Path("data/a.png"), (1, 2, 3), size)},
        fit=fit,
        bucket_no_upscale=no_upscale,
    )
    shape = [4, wanted[0] // 8, wanted[1] // 8]
    put(LATENTS, content(LATENTS, [4, shape[1] + 1, shape[2]]))
    assert run(work) == [0, 0, 0, 1, 0]
    put(LATENTS, content(LATENTS, shape))
    assert run(work) == [1, 0, 0, 0, 0]


# -- what does not fit ----------------------------------------------------------------------------


UNFIT: dict[str, tuple[str, bytes, str]] = {
    "empty": (LATENTS, b"", "is cut short or no safetensors file"),
    "no safetensors": (T5, b"\x80\x04pickled, and never unpickled", "no safetensors file"),
    "another name": (LATENTS, safetensors(latents=("F32", [1], b"1234")), "holds `latents`"),
    "two tensors": (
        LATENTS,
        safetensors(latent=("F32", [1], b"1234"), more=("F32", [1], b"1234")),
        "holds `latent` and `more`",
    ),
    "no tensor": (T5, safetensors(), "holds nothing in place of `emb` alone"),
    "another format of latents": (
        LATENTS,
        content(LATENTS, [4, 2, 2], dtype="BF16"),
        "`latent` is in bfloat16, not in float32",
    ),
    "another format of text": (T5, content(T5, [3, 8], dtype="F32"), "is in float32, not in"),
    "too many channels": (LATENTS, content(LATENTS, [16, 2, 2]), "is [16, 2, 2] and not [4, 2, 2]"),
    "infinite": (LATENTS, content(LATENTS, [4, 2, 2], float("inf")), "not finite"),
    "no number": (T5, content(T5, [3, 8], float("nan")), "not finite"),
    "zero": (LATENTS, content(LATENTS, [4, 2, 2], 0.0), "nothing but zeros"),
    "too many tokens": (T5, content(T5, [7, 8]), "is [7, 8] and not [1 to 6, 8]"),
    "another width": (T5, content(T5, [3, 16]), "is [3, 16]"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_named_and_stays_out(name: str) -> None:
    ending, data, words = UNFIT[name]
    work = image() if ending == LATENTS else caption()
    path = put(ending, data)
    said: list[str] = []
    assert run(work, say=said.append) == [0, 0, 0, 1, 0]
    assert said[0].startswith(f"not adopted: {path}: ")
    assert words in said[0] and "\n" not in said[0]
    assert not list(Path("cache").rglob("*.safetensors"))


@pytest.mark.parametrize("tokens", [4, 6])
def test_an_encoder_that_pads_gives_always_as_many_tokens(tokens: int) -> None:
    work = caption()
    put(CLIP, content(CLIP, [tokens, 8]))
    assert run(work, texts=(CLIP,)) == [0, 0, 0, 1, 0]


def test_values_that_the_format_of_the_model_cannot_hold_stay_out() -> None:
    work, said = image(), list[str]()
    put(LATENTS, content(LATENTS, [4, 2, 2], 1e6))
    half = dataclasses.replace(work, recipe={**work.recipe, "dtype": "float16"})
    assert run(half, say=said.append) == [0, 0, 0, 1, 0]
    assert "data/a.img_sdxl: holds values too large for float16" in said[0]


@pytest.mark.parametrize("spoilt", [b"", b"no image", None], ids=["empty", "another", "missing"])
def test_a_faulty_image_is_named_and_its_latents_stay_out(spoilt: bytes | None) -> None:
    work, said = image(), list[str]()
    put(LATENTS, content(LATENTS, [4, 2, 2]))
    path = Path("data/a.png")
    path.unlink() if spoilt is None else path.write_bytes(spoilt)
    assert run(work, say=said.append) == [0, 0, 0, 1, 0]
    assert said[0].startswith("not adopted: data/a.png: ")


# -- what is of other content ---------------------------------------------------------------------


def test_a_cache_of_what_was_edited_is_not_replaced() -> None:
    put_image(Path("data/a.png"), (1, 2, 3))
    path, said = put(T5, content(T5, [3, 8])), list[str]()
    assert run(caption()) == [1, 0, 0, 0, 0]
    edited = caption(text="a dog")
    assert run(edited, say=said.append) == [0, 0, 0, 0, 1]
    assert said[0].startswith(f"not adopted: {path}: may be of what data/a.txt held before it was ")
    assert said[0].endswith("; remove that file to adopt this one all the same")
    assert run(caption()) == [0, 1, 0, 0, 0]


def test_an_exported_file_is_adopted_for_its_own_content_alone() -> None:
    works = image(), caption()
    put(LATENTS, content(LATENTS, [4, 2, 2]))
    put(T5, content(T5, [3, 8]))
    run(*works)
    write_out()
    shutil.rmtree("cache")
    shutil.move("out/cats/a.txt_t5cache", "data/a.txt_t5cache")
    assert run(caption(text="a dog")) == [0, 0, 0, 0, 1]
    assert run(caption()) == [1, 0, 0, 0, 0]


# -- what is refused at once ----------------------------------------------------------------------


IMPOSSIBLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "URL": ({"path": "s3://bucket/cats"}, {}, "lies at a URL"),
    "hub": (
        {},
        {"text": [{"hub": "somebody/something", "revision": "1" * 40}]},
        "no config.json on this disk",
    ),
    "caption": ({"caption_extension": T5}, {}, "is taken for a caption of cats"),
    "image": ({}, {"ai_training": {"latents": ".PNG"}}, "is taken for an image"),
    "nothing named": ({}, {"ai_training": None}, "models.tiny.ai_training: this key is missing"),
}


@pytest.mark.parametrize("plan", [plan_adopt, plan_export])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_is_one_line(plan: Callable[[Facts, str], object], name: str) -> None:
    dataset, model, words = IMPOSSIBLE[name]
    put_image(Path("data/a.png"), (1, 2, 3))
    Path("text").mkdir()
    Path("text/config.json").write_text('{"model_type": "t5", "d_model": 8}')
    config = parse(
        {
            "datasets": {"cats": {"path": "data", **dataset}},
            "models": {
                "tiny": {"vae": "vae", "text": "text", "ai_training": {"text": T5}, **model}
            },
            "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": 64}},
        }
    )
    with pytest.raises(ConfigError, match=words) as caught:
        plan(Facts(config, Memo(None)), "first")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [(None, "has the resolutions 64, 96"), (32, "has no resolution 32"), ([96, 64], "96x64")],
)
def test_an_export_is_of_one_of_the_resolutions_of_its_run(asked: object, words: str) -> None:
    config = parse(
        {
            "datasets": {"cats": {"path": "data"}},
            "models": {"tiny": {"vae": "vae", "text": "text", "ai_training": {"latents": LATENTS}}},
            "runs": {"first": {"datasets": "cats", "model": "tiny", "resolutions": [64, 96]}},
            "export": {"resolution": asked},
        }
    )
    with pytest.raises(ConfigError, match=words) as caught:
        plan_export(Facts(config, Memo(None)), "first")
    assert str(caught.value).startswith("export.resolution: ")
