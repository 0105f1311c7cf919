"""Odd configurations and damaged files: each ends in one line or in a plan, within limits.

    python tests/bench/damage.py [--seed 0] [--cases 400] [--only 7 12] [--kinds picture] [--keep]

Three of four cases are configurations, drawn from the schema or changed from good ones; the others
damaged pictures, captions, lists, metadata, models, caches, videos, configuration files and dataset
files of other trainers, or pipes, devices, folders and endless files in their place. Each is
planned, and encoded where it can be, in a process of its own with limits. Printed is a line for
each case that went wrong, and what it said; its folder stays. A number with its seed is the same
case each time.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "workflow"), str(TESTS / "worlds")]
# No case may reach a network, nor wait for one.
os.environ |= {
    **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "AWS_MAX_ATTEMPTS": "1"},
    **{"AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
    **{"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none"},
}

import pyarrow  # noqa: E402
import world  # noqa: E402
import yaml  # noqa: E402
from damage_world import (  # noqa: E402
    DATASET_FILES,
    as_json,
    changed,
    damaged,
    damaged_json,
    damaged_text,
    make_project,
    misplaced,
    videos,
    with_fragment,
    with_odd_value,
)
from latentmake.config.document import check_files  # noqa: E402
from latentmake.config.root import parse  # noqa: E402
from latentmake.data.memo import Memo  # noqa: E402
from latentmake.entry import exit_on_mistake, logged  # noqa: E402
from latentmake.pages.verification import verify  # noqa: E402
from latentmake.plan.facts import Facts  # noqa: E402
from latentmake.session import Session  # noqa: E402
from latentmake.trainers.exchange.datasets_toml import imported  # noqa: E402
from pyarrow import parquet  # noqa: E402

MEMORY = 2 << 30  # bytes that a case may take
SECONDS = 60  # that it may compute, and twice as many that it may last
LONGEST, LONGEST_ERROR = 10_000, 500  # characters of a line
WORDS = (
    *("train", "generate", "evaluate", "caches", "latents", "text", "status", "publish"),
    *("export", "captions", "clips", "report"),
)
ENDS = ("sound", "in one line", "wrong")
EXAMPLES = TESTS.parent / "config"

Dice = random.Random
Case = Callable[[Dice], None]


# -- what is done with a case ---------------------------------------------------------------------


def _plan(values: dict[str, Any], *targets: str) -> Session:
    return Session(values, targets=targets, main=True, read_only=True)


def _encode(values: dict[str, Any]) -> None:
    """Plan, and carry out the jobs as Snakemake would."""
    from latentmake.backends import encoder_of
    from latentmake.encode.runner import carry_out
    from latentmake.trainers.sd.network import load_unet
    from latentmake.trainers.wan.recipe import load_transformer

    plan = _plan(values, "train_tiny").plan
    with logged("logs/job.log") as say:
        for job in plan.jobs:
            carry_out(
                job.orders,
                say=say,
                threads=1,
                external=encoder_of,
            )
        for job in plan.jobs[:1]:
            model = job.orders[0].model_settings
            if model.unet is not None:
                load_unet(model.unet)
            elif model.dit is not None:
                load_transformer(model.dit)


def _good(**dataset: Any) -> dict[str, Any]:
    values = world.config()
    values["datasets"]["shapes"].update(dataset)
    values["runs"]["tiny"] |= {"resolutions": [16], "trainer": world.training()}
    return values


# -- cases, each in a folder of its own -----------------------------------------------------------


def _configuration(dice: Dice) -> None:
    if dice.random() < 0.7:
        values = dice.choice((_good, _good, videos))()
    else:
        place = dice.choice(sorted(EXAMPLES.glob("examples/*.yaml")))
        values = yaml.safe_load(place.read_bytes())
        for dataset in values["datasets"].values():
            dataset["path"] = "data/shapes"
    values = changed(values, dice)
    runs = values.get("runs")
    run = dice.choice([*runs, "tiny"]) if isinstance(runs, dict) else "tiny"
    _plan(values, *([f"{dice.choice(WORDS)}_{run}"] if dice.random() < 0.7 else []))


def _document(dice: Dice) -> None:
    text = dice.choice(sorted(EXAMPLES.rglob("*.yaml"))).read_text(encoding="utf-8")
    path, chance = Path("config.yaml"), dice.random()
    if chance < 0.1:
        misplaced(path, dice)
    else:
        damage = with_fragment if chance < 0.5 else damaged_text
        path.write_bytes(damage(text, dice) if chance < 0.8 else damaged(text.encode(), dice))
    check_files([path])
    _plan(yaml.safe_load(path.read_bytes()))


def _picture(dice: Dice) -> None:
    good = dice.choice(sorted(Path("pictures").iterdir()))
    ending = good.suffix if dice.random() < 0.9 else dice.choice((".png", ".jpg", ".tif"))
    Path("data/shapes/odd.txt").write_text("a picture")
    path = Path(f"data/shapes/odd{ending}")
    path.write_bytes(damaged(good.read_bytes(), dice))
    _maybe_misplaced(path, dice)
    _encode(_good())


def _caption(dice: Dice) -> None:
    text = "a red circle, a blue square, {left|right}\nsecond line, more words\n"
    _replace("data/shapes/ant.txt", damaged_text(text, dice))
    _maybe_misplaced(Path("data/shapes/ant.txt"), dice)
    making = {"variants": 2, "enable_wildcard": True, "shuffle_caption": True}
    _encode(_good(captions=making) if dice.random() < 0.5 else _good())


def _list(dice: Dice) -> None:
    if dice.random() < 0.3:
        rows = [
            {"video": "waves/calm.mp4", "prompt": "calm", "first_frame": 2, "frames": 5},
            {"video": "waves/calm.mp4", "prompt": "calm", "start": 0.1, "end": 0.9, "stride": 2},
            {"video": "waves/choppy.mp4", "prompt": "choppy"},
        ]
        _replace("data/clips.jsonl", _json(rows, dice))
        _plan(videos(), "train_tiny")
        return
    rows = [{"image": f"shapes/{stem}.png", "prompt": "a shape"} for stem in ("ant", "bee")]
    path = Path("data") / dice.choice(("list.json", "list.jsonl", "list.parquet"))
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        path.write_bytes(damaged(path.read_bytes(), dice))
    else:
        path.write_bytes(_json(rows, dice, lines=path.suffix == ".jsonl"))
    _maybe_misplaced(path, dice)
    _encode(_good(path=str(path)))


def _metadata(dice: Dice) -> None:
    name = dice.choice(("meta.json", "meta.jsonl", "meta.csv"))
    rows: Any = {f"{stem}.png": {"caption": "a shape", "tags": "x, y"} for stem in ("ant", "bee")}
    path = Path("data") / name
    if name == "meta.csv":
        lines = ["file_name,text,tags", *(f'{stem},"a, b",x' for stem in rows)]
        path.write_bytes(damaged_text("\n".join(lines), dice))
    else:
        listed = [{"file_name": stem, **row} for stem, row in rows.items()]
        lines = name == "meta.jsonl"
        path.write_bytes(_json(listed if lines else rows, dice, lines=lines))
    _maybe_misplaced(path, dice)
    _encode(_good(metadata_file=str(path), metadata_captions=dice.choice(("override", "join"))))


def _json(values: Any, dice: Dice, *, lines: bool = True) -> bytes:
    """Return a file of JSON, or of a list in lines, of which values or bytes are damaged."""
    odd = damaged_json(values, dice) if dice.random() < 0.6 else values
    parts = odd if lines and isinstance(odd, list) else [odd]
    data = b"\n".join(as_json(each, dice) for each in parts)
    return damaged(data, dice) if odd is values else data


def _model(dice: Dice) -> None:
    path = dice.choice([x for x in sorted(Path("models").rglob("*")) if x.is_file()])
    data = path.read_bytes()
    if path.suffix == ".json" and dice.random() < 0.8:
        data = as_json(damaged_json(json.loads(data), dice), dice)
    elif path.suffix == ".safetensors" and dice.random() < 0.5:
        length = int.from_bytes(data[:8], "little")
        header = as_json(damaged_json(json.loads(data[8 : 8 + length]), dice), dice)
        data = len(header).to_bytes(8, "little") + header + data[8 + length :]
    else:
        data = damaged(data, dice)
    _replace(path, data)
    _maybe_misplaced(path, dice, endless=False)
    values = _good() if "micro" in path.parts else videos()
    values["runs"]["tiny"]["datasets"] = ["shapes"]  # decoding clips takes further processes
    _encode(values)


def _cache(dice: Dice) -> None:
    path = dice.choice([x for x in sorted(Path("built").rglob("*")) if x.is_file()])
    data = damaged(path.read_bytes(), dice)
    for folder in ("cache", ".latentmake"):
        shutil.copytree(Path("built") / folder, folder)
    _replace(path.relative_to("built"), data)
    _maybe_misplaced(path.relative_to("built"), dice, endless=False)
    if dice.random() < 0.5:
        _replace("data/shapes/ant.txt", b"another caption")
    with exit_on_mistake():
        verify(Facts(parse(_good()), Memo(None)), ["tiny"], repair=dice.random() < 0.5)
    _encode(_good())


def _dataset_file(dice: Dice) -> None:
    path, text = Path("odd.toml"), dice.choice(DATASET_FILES)
    path.write_bytes(with_odd_value(text, dice))
    if dice.random() < 0.4:
        path.write_bytes(damaged_text(text, dice))
    _maybe_misplaced(path, dice)
    with exit_on_mistake():
        imported(path, "tiny")


def _video(dice: Dice) -> None:
    from latentmake.formats.media import probe_video

    good = dice.choice(sorted(Path("data/waves").iterdir()))
    Path("odd.mp4").write_bytes(damaged(good.read_bytes(), dice))
    _maybe_misplaced(Path("odd.mp4"), dice)
    with exit_on_mistake():
        probe_video("odd.mp4")


KINDS: dict[str, Case] = {
    "configuration": _configuration,
    "picture": _picture,
    "caption": _caption,
    "list": _list,
    "model": _model,
    "metadata": _metadata,
    "cache": _cache,
    "document": _document,
    "video": _video,
    "dataset file": _dataset_file,
}


def _kind(number: int, kinds: Collection[str]) -> str:
    """Return the kind of a case: three configurations, then one of the others in turn."""
    turns = [x for other in KINDS for x in (*["configuration"] * 3, other) if x in kinds]
    return turns[number % len(turns)]


def _maybe_misplaced(path: Path, dice: Dice, *, endless: bool = True) -> None:
    if dice.random() < 0.15:
        misplaced(path, dice, endless=endless)


def _replace(path: str | Path, data: bytes) -> None:
    """Write a file that may be a link to that of the template."""
    Path(path).unlink()
    Path(path).write_bytes(data)


# -- the harness ----------------------------------------------------------------------------------


def _template(folder: Path) -> None:
    """Make a project, and its caches in a folder of their own."""
    make_project(folder)
    for act in (lambda _: _plan(videos(), "train_tiny"), lambda _: _encode(_good())):
        status, said = _apart(folder, act, random.Random(0))
        if status:
            raise SystemExit(f"the undamaged project: {said}")
    (folder / "built").mkdir()
    for name in ("cache", ".latentmake"):
        (folder / name).rename(folder / "built" / name)


def _apart(folder: Path, case: Case, dice: Dice) -> tuple[int, str]:
    """Do something in a process of its own with limits; return its status and what it said."""
    place = folder.with_suffix(".txt")
    child = os.fork()
    if child == 0:
        _alone(folder, place, functools.partial(case, dice))
    until = time.monotonic() + 2 * SECONDS
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, place.read_text(encoding="utf-8", errors="replace")


def _alone(folder: Path, place: Path, act: Callable[[], None]) -> None:
    """Do something in this process, and end it."""
    status = 70
    try:
        os.chdir(folder)
        os.environ["HOME"] = str(folder)
        with place.open("ab") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        sys.stdout = sys.stderr = place.open("a", encoding="utf-8", errors="backslashreplace")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            act()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
            sys.stderr.write(f"{end.code}\n" if isinstance(end.code, str) else "")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _fault(status: int, said: str) -> str:
    """Return what is wrong with a case; "" where nothing is."""
    lines = said.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if status < 0:
        name = signal.Signals(-status).name
        return f"{name} (more than {SECONDS} s)" if name in ("SIGXCPU", "SIGKILL") else name
    if "Traceback" in said:
        places = [line.strip() for line in lines if "/latentmake/" in line]
        return f"{lines[-1][:200]} ({places[-1] if places else 'in no module of ours'})"
    if status != bool(errors) or len(errors) > 1:
        return f"status {status} and {len(errors)} errors"
    if len(longest := max(lines, key=len, default="")) > LONGEST:
        return f"a line of {len(longest)} characters: {longest[:100]}"
    if errors and len(errors[0]) > LONGEST_ERROR:
        return f"an error of {len(errors[0])} characters"
    if odd := next((x for x in said if not x.isprintable() and x not in "\n\t\r"), None):
        return f"a character {odd!a}"
    noise = [line for line in lines if "Warning" in line]
    return noise[0] if noise else ""


def main() -> None:
    """Do cases, print those that went wrong, and fail if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--keep", action="store_true", help="keep all folders, and say all")
    parser.add_argument("--folder", type=Path, help="a new folder for the cases")
    chosen = parser.parse_args()
    import diffusers
    import torch
    import transformers

    for name in ("AutoencoderKL", "UNet2DConditionModel", "DDPMScheduler"):
        getattr(diffusers, name)
    for name in ("CLIPTextModel", "CLIPTokenizer", "AutoTokenizer"):
        getattr(transformers, name)
    torch.set_num_threads(1)
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="latentmake-damage-"))
    begun, ends = time.monotonic(), Counter[tuple[str, str]]()
    _template(folder / "template")
    for number in chosen.only or range(chosen.cases):
        kind = _kind(number, chosen.kinds)
        place = folder / f"{number}-{kind}/project"
        shutil.copytree(folder / "template", place, copy_function=os.link)
        status, said = _apart(place, KINDS[kind], random.Random(f"{chosen.seed} {number}"))
        wrong = _fault(status, said)
        ends[kind, "wrong" if wrong else "in one line" if status else "sound"] += 1
        if wrong or chosen.keep:
            print(f"{number} {kind}: {wrong}\n  {said[-1000:]!r}", flush=True)
        else:
            shutil.rmtree(place.parent)
    for kind in chosen.kinds:
        print(f"{kind}: " + ", ".join(f"{ends[kind, end]} {end}" for end in ENDS))
    count = sum(count for (_, end), count in ends.items() if end == "wrong")
    print(
        f"seed {chosen.seed}: {ends.total()} cases, {count} wrong, {time.monotonic() - begun:.0f} s"
    )
    if count:
        raise SystemExit(f"the folders of those are in {folder}")
    if chosen.folder is None and not chosen.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
