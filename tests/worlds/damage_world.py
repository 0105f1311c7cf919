"""Odd configurations, by a small grammar over the schema, damaged copies of files, and good ones.

What is odd or damaged is drawn from a source of random choices: a seed gives the same again.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import world
from PIL import Image

_ROOT = Path(__file__).parents[2]
_SCHEMA = json.loads((_ROOT / "config/schema.json").read_text(encoding="utf-8"))
_Nodes = list[dict[str, Any]]
"""Parts of the schema, one of which a value may follow."""

_NUMBERS = (
    *(0, -1, 1, 3, 16, 255, 10**9, 2**63, 2**64, 10**18, -(10**18), 10**400, 0.5, 1e-300, 1e308),
    *("1e308", "inf", "nan"),
)
_WORDS = (
    *("", " ", "a", "ant", "shapes", "micro", "tiny", "auto", "none", "null", "yes", "0", "16"),
    *("16x32", "0x0", "99999999x1", "data/shapes", "data/shapes/ant.png", "models/micro/vae"),
    *("models/micro/vae/config.json", "nowhere/at/all", "../up", "~", "C:/x", "s3://bucket/x"),
    *("{stem}", "{}", "%s", "$HOME", "`id`", "a\nb", "a\0b", "\x1b[31m", "é ü", "١٦", "²", "é"),
    *("x" * 300, ".txt", ".", "-", "--help", "a b", "'", '"', "1" * 5000, "x/" * 3000, ".x" * 300),
    *("/dev/zero", "/dev/null", "odd/pipe", "odd/pipe.json", "odd/pipe.jsonl", "odd/zero.csv"),
    *("odd/pipe.safetensors", "odd/zero.safetensors", "odd/pipe.png", "odd/endless.json"),
)
_FRAGMENTS = (
    *(
        "!!int ''",
        "!!int x",
        "!!float x",
        "!!bool maybe",
        "!!binary '!!'",
        "!!binary YQ==",
        "!!str 8",
    ),
    *("!!python/name:os.system ''", "!!python/object/apply:os.system ['true']", "!!set {a}"),
    *("!!timestamp x", "2001-99-01", "2001-01-01", "!!null x", "!x 8", "<<", "=", "*gone"),
    *("010", "0o17", "1:30", "1:30.5", "-0_10", "1" + ":1" * 3000, "9" * 5000, ".inf", ".nan"),
    *("[" * 5000, "{a: " * 5000, "- " * 5000, "[" * 200 + "]" * 200, "&x [*x]", "&x {<<: *x}"),
    *('"\\0"', '"\\UFFFFFFFF"', '"\\uD800"', "\t8", "\n---\na: 1", "'", "{", "%", "\0"),
)
"""Values of YAML that are odd as text."""
_ODD = (
    *(None, True, False, math.nan, math.inf, -math.inf, [], {}, [[]], [None], {"": ""}),
    *({1: 2}, {None: None}, datetime.date(2026, 1, 1), b"\xff", {1, 2}, ["a"] * 2000),
)


# -- configurations -------------------------------------------------------------------------------


def _alternatives(node: dict[str, Any]) -> _Nodes:
    if "$ref" in node:
        return _alternatives(_SCHEMA["$defs"][node["$ref"].rpartition("/")[2]])
    several = node.get("anyOf") or node.get("oneOf")
    return [x for each in several for x in _alternatives(each)] if several else [node]


def _below(nodes: _Nodes, key: Any) -> _Nodes:
    """Return the parts of the schema for a value in an object or list."""
    found: list[Any] = []
    for node in nodes:
        if isinstance(key, int):
            found.append(node.get("items"))
        elif key in node.get("properties", {}):
            found.append(node["properties"][key])
        else:
            found += [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
    return [x for each in found if isinstance(each, dict) for x in _alternatives(each)]


def _places(values: Any, nodes: _Nodes) -> Iterator[tuple[Any, Any, _Nodes]]:
    """Yield each object or list, a key or index of it, and the schema of the value there."""
    if isinstance(values, dict) and isinstance(kind := values.get("kind"), str):
        own = [x for x in nodes if x.get("properties", {}).get("kind", {}).get("const") == kind]
        nodes = own or nodes
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in list(pairs):
        below = _below(nodes, key)
        yield values, key, below
        if isinstance(value, dict | list):
            yield from _places(value, below)


def _drawn(node: dict[str, Any], dice: Random, depth: int = 0) -> Any:
    """Return a value that follows a part of the schema, as a rule."""
    if "default" in node and dice.random() < 0.2:
        return copy.deepcopy(node["default"])
    node = dice.choice(_alternatives(node))
    if "const" in node or "enum" in node:
        return dice.choice(node.get("enum") or [node["const"]])
    kind = node.get("type")
    if kind == "object":
        required = node.get("required", ())
        return {
            key: _drawn(own, dice, depth + 1)
            for key, own in node.get("properties", {}).items()
            if key in required or dice.random() < 0.1 / (depth + 1)
        }
    if kind == "array":
        least = node.get("minItems", 0)
        number = dice.randint(least, max(least, min(3, node.get("maxItems", 3))))
        return [_drawn(node.get("items", {}), dice, depth + 1) for _ in range(number)]
    if kind in ("integer", "number"):
        least = node.get("minimum", node.get("exclusiveMinimum", 0))
        most = node.get("maximum", node.get("exclusiveMaximum", 10**18))
        values = [least, most, least + 1, most - 1, least + 0.25, 2, 4, 8, 16, 32, 64, 10**12]
        return dice.choice([x for x in values if kind == "number" or isinstance(x, int)])
    return {"boolean": dice.random() < 0.5, "null": None}.get(str(kind), dice.choice(_WORDS))


def _odd(dice: Random) -> Any:
    return copy.deepcopy(dice.choice(dice.choice((_NUMBERS, _WORDS, _ODD))))


def with_fragment(text: str, dice: Random) -> bytes:
    """Return a configuration with an odd value in the place of one, or behind it."""
    lines = text.splitlines()
    places = [number for number, line in enumerate(lines) if re.match(r" *[\w-]+: ", line)]
    number = dice.choice(places or [0])
    key, _, value = lines[number].partition(": ")
    odd = dice.choice(_FRAGMENTS)
    lines[number] = f"{key}: {dice.choice((odd, odd, f'{value} {odd}', f'[{odd}]'))}"
    if dice.random() < 0.1:  # each line stands for ten of the one before
        several = ", ".join(["*x{}"] * 10)
        lines += ["x0: &x0 [a]"]
        lines += [f"x{n}: &x{n} [{several.replace('{}', str(n - 1))}]" for n in range(1, 20)]
    return "\n".join(lines).encode()


def changed(values: dict[str, Any], dice: Random) -> dict[str, Any]:
    """Return a configuration with one to three changes."""
    found = copy.deepcopy(values)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        places = list(_places(found, [_SCHEMA]))
        if not places:
            break
        holder, key, nodes = dice.choice(places)
        sections = [x for x in nodes if x.get("properties")]
        chance = dice.random()
        if sections and isinstance(holder[key], dict) and chance < 0.9:
            name, node = dice.choice(list(dice.choice(sections)["properties"].items()))
            holder[key][name] = _drawn(node, dice)
        elif chance < 0.7 and nodes:
            holder[key] = _drawn(dice.choice(nodes), dice)
        elif chance < 0.9:
            holder[key] = _odd(dice)
        elif chance < 0.93:
            del holder[key]
        elif isinstance(holder, dict) and chance < 0.97:
            other = dice.choice((f"{key}s", str(key)[:-1], str(key).upper(), 5, None))
            holder[other] = holder.pop(key)
        else:
            holder[key] = [holder[key]] * dice.choice((1, 2, 500))
    return found


# -- files ----------------------------------------------------------------------------------------


def damaged(data: bytes, dice: Random) -> bytes:
    """Return a copy of a file with some bytes cut off, changed, repeated or put in between."""
    found = bytearray(data)
    for _ in range(dice.randint(1, 3)):
        size = len(found)
        # Most of what a file says of itself stands at its beginning.
        start = int(size * dice.random() ** dice.choice((1, 4, 12)))
        end = min(size, start + dice.choice((1, 2, 4, 8, 64, 1024)))
        kind = dice.choice(("cut", "flip", "number", "zero", "noise", "repeat", "remove", "insert"))
        if kind == "cut":
            del found[start:]
        elif kind == "flip" and size:
            found[min(start, size - 1)] ^= 1 << dice.randrange(8)
        elif kind == "number":
            width = dice.choice((1, 2, 4, 8))
            number = dice.choice((0, 1, 2**15, 2**31 - 1, 2**63 - 1, 2**64 - 1)) % 2 ** (8 * width)
            found[start : start + width] = number.to_bytes(width, dice.choice(("little", "big")))
        elif kind == "zero":
            found[start:end] = bytes(end - start)
        elif kind == "noise":
            found[start:end] = dice.randbytes(end - start)
        elif kind == "repeat":
            found[start:start] = found[start:end] * dice.choice((1, 100))
        elif kind == "remove":
            del found[start:end]
        else:
            found[start:start] = dice.randbytes(dice.choice((1, 100)))
    return bytes(found)


def damaged_json(values: Any, dice: Random) -> Any:
    """Return JSON with some values replaced by odd ones, or by some of another place."""
    found = [copy.deepcopy(values)]
    for _ in range(dice.randint(1, 3)):
        places = list(_places(found, []))
        holder, key, _ = dice.choice(places)
        chance = dice.random()
        if chance < 0.1:
            del holder[key]
        elif chance < 0.25:
            other, name, _ = dice.choice(places)
            holder[key] = copy.deepcopy(other[name])
        elif chance < 0.3:
            holder[key] = json.loads("[" * 90 + "]" * 90)
        else:
            holder[key] = _odd(dice)
        found = found or [{}]
    return found[0]


def as_json(values: Any, dice: Random) -> bytes:
    """Return the file of a JSON value, in UTF-8 or, now and then, another encoding."""
    text = json.dumps(values, default=str, skipkeys=True, ensure_ascii=dice.random() < 0.5)
    encoding = dice.choice(("utf-8", "utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "utf-16-le"))
    return text.encode(encoding, "surrogatepass")


def damaged_text(text: str, dice: Random) -> bytes:
    """Return a text in another encoding, with odd characters, far too long, or damaged."""
    chance = dice.random()
    if chance < 0.25:
        return damaged(text.encode(), dice)
    if chance < 0.4:
        text = dice.choice(("", " \n", "\ufeff", "\r", "x" * 20_000_000, "x " * 400_000))
    elif chance < 0.75:
        odd = ("{", "}", "{{", "|", "{a|b}", ",,", "\n", "\0", "\x1b", "\u2028", "\U0001f600", "é")
        for _ in range(dice.randint(1, 20)):
            place = dice.randint(0, len(text))
            text = text[:place] + dice.choice(odd) * dice.choice((1, 2, 300)) + text[place:]
    encoding = dice.choice(("utf-8", "utf-8", "utf-16", "utf-16-le", "utf-32", "latin-1"))
    return text.encode(encoding, "replace")


def misplaced(path: Path, dice: Random, *, endless: bool = True) -> None:
    """Put in the place of a file what is none, or has no end."""
    path.unlink(missing_ok=True)
    kind = dice.choice(("folder", "pipe", "device", "circle", "endless" if endless else "folder"))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path.name)


DATASET_FILES = (
    """
[general]
resolution = [960, 544]
caption_extension = ".txt"
enable_bucket = true
[[datasets]]
image_directory = "data/shapes"
num_repeats = 2
[[datasets]]
video_directory = "data/waves"
target_frames = [1, 25]
source_fps = 16.0
""",
    """
[[datasets]]
resolution = 512
batch_size = 2
[[datasets.subsets]]
image_dir = "data/shapes"
caption_extension = ".txt"
shuffle_caption = true
caption_dropout_rate = 0.1
[[datasets.subsets]]
image_dir = "data/waves"
class_tokens = "a man"
is_reg = true
""",
)
"""Dataset files of musubi-tuner and of sd-scripts."""
_TOML = (
    *("-1", "1.5", "1e308", "nan", "9999999999999999999", "true", "2020-01-01", '""', "[]", "[1]"),
    *('"a\\u0000b"', "[1, 2, 3]", '[["a"]]', "{a = 1}", f'"{"x" * 300}"', '"$x"', '"."', "x", "'"),
)


def with_odd_value(text: str, dice: Random) -> bytes:
    """Return a TOML file with some odd values, and perhaps a line of it in another place."""
    lines = text.splitlines()
    for _ in range(dice.randint(1, 3)):
        number = dice.randrange(len(lines))
        key, equals, _ = lines[number].partition(" = ")
        if equals and dice.random() < 0.8:
            lines[number] = f"{key} = {dice.choice(_TOML)}"
        else:
            lines.insert(dice.randrange(len(lines)), lines.pop(number))
    return "\n".join(lines).encode()


# -- what is damaged ------------------------------------------------------------------------------


def make_project(folder: Path) -> None:
    """Make datasets of two pictures and two videos, models, and a good picture of each format."""
    import dit_world  # seconds of import, as of those below
    import wan_world

    world.make_dataset(folder / "data/shapes")
    world.keep(folder / "data/shapes", 2)
    world.make_model(folder / "models/micro")
    wan = folder / "models/wan"
    wan_world.write_wan_vae(wan)
    wan_world.write_umt5(wan)
    dit_world.tiny_dit(text_dim=24).save_pretrained(wan / "dit")
    for name in ("calm_blue_grey", "choppy_teal_white"):
        clip = folder / f"data/waves/{name.partition('_')[0]}.mp4"
        clip.parent.mkdir(exist_ok=True)
        shutil.copy(_ROOT / f"data/waves/clips/{name}.mp4", clip)
    (folder / "data/clips.jsonl").write_text('{"video": "waves/calm.mp4", "prompt": "calm"}\n')
    (folder / "odd").mkdir()
    for ending in ("", ".json", ".jsonl", ".safetensors", ".png"):
        os.mkfifo(folder / f"odd/pipe{ending}")
    for ending in (".csv", ".safetensors"):
        (folder / f"odd/zero{ending}").symlink_to("/dev/zero")
    (folder / "odd/endless.json").touch()
    os.truncate(folder / "odd/endless.json", 1 << 40)
    (folder / "pictures").mkdir()
    image = Image.open(folder / "data/shapes/ant.png")
    for ending in ("png", "jpg", "webp", "bmp", "tif", "gif", "avif"):
        image.save(folder / f"pictures/plain.{ending}")
    image.getexif()[0x0112] = 6  # to be turned
    image.save(folder / "pictures/turned.jpg", progressive=True, exif=image.getexif())
    image.convert("P").save(folder / "pictures/palette.png", transparency=0)
    image.convert("CMYK").save(folder / "pictures/inks.jpg")
    image.convert("I;16").save(folder / "pictures/deep.tif", compression="tiff_lzw")
    image.save(folder / "pictures/moving.webp", save_all=True, append_images=[image.rotate(90)])


def videos() -> dict[str, Any]:
    """Return the configuration of a run of Wan, with pictures and a list of videos."""
    model = {"task": "t2v-1.3B", "vae": "models/wan/vae", "dit": "models/wan/dit"}
    umt5 = {"path": "models/wan/text_encoder", "tokenizer": "models/wan/tokenizer"}
    clips = {"path": "data/clips.jsonl", "target_frames": [5], "fit": "crop"}
    run = {"datasets": ["shapes", "clips"], "model": "wan", "resolutions": [16]}
    return {
        "datasets": {"shapes": {"path": "data/shapes"}, "clips": clips},
        "models": {"wan": {**model, "text": umt5}},
        "runs": {"tiny": {**run, "trainer": {"kind": "wan", "rank": 2, "steps": 2}}},
    }
