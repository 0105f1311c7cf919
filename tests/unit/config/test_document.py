"""Each mistake in the text of a configuration file is one line with the file and its line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.base.errors import ConfigError
from latentmake.commands.project import opened
from latentmake.config.document import check_command, check_file, check_files
from latentmake.config.places import Places

ROOT = Path(__file__).resolve().parents[3]

# Each line holds the one before: ten times, or once.
LAUGHS, MERGES, LADDER = (
    first
    + b"".join(line.replace(b"N", b"%d" % n).replace(b"M", b"%d" % (n - 1)) for n in range(1, 99))
    for first, line in (
        (b"a0: &a0 [x]\n", b"aN: &aN [" + b"*aM," * 10 + b"]\n"),
        (b"a0: &a0 {x: 1}\n", b"aN: &aN {<<: [" + b"*aM," * 10 + b"]}\n"),
        (b"a0: &a0 []\n", b"aN: &aN [*aM]\n"),
    )
)

MISTAKES: dict[str, tuple[bytes, str, str]] = {
    "a key twice": (
        b"r:\n  a: {}\n  b: {}\n  a: {}\n",
        ", line 4",
        "`a` occurs twice, first in li",
    ),
    "a tab": (b"runs:\n\ta: 1\n", ", line 2", "a tab stands where YAML wants spaces"),
    "brackets": (b"runs: {}\nmodels: {a: [b}}\n", ", line 2", "expected ',' or ']', but got '}'"),
    "a quote": (b"runs:\n  a: 'b\n", ", line 3", "check brackets, quotes"),
    "a list": (b"# mine\n- a\n- b\n", "", "has no sections"),
    "nothing": (b"", "", "is empty"),
    "Latin-1": ("a: 1\nb: Kätzchen\n".encode("latin-1"), ", line 2", "0xe4 is not UTF-8"),
    "UTF-16": ("a: 1\n".encode("utf-16"), ", line 1", "save it in UTF-8"),
    "a zero byte": (b"a: 1\nb: x\0y\n", ", line 2", "U+0000 is not allowed"),
    "a list for a key": (b"a: 1\n? [b]\n: c\n", ", line 2", "a key is a list or section"),
    "a tag": (b"a: !!python/name:os.system\n", ", line 1", "!!python/name:os.system, which no key"),
    "a tag of one's own": (b"a: 1\nb: !c 8\n", ", line 2", "`8` has the YAML type !c"),
    "an empty number": (b"a: 1\nb: !!int ''\n", ", line 2", "a value cannot be read as !!int"),
    "a truth": (b"a: !!bool maybe\n", ", line 1", "`maybe` cannot be read as !!bool"),
    "a date": (b"a: 1\nb: 2001-99-01\n", ", line 2", "`2001-99-01` has the YAML type !!timestamp"),
    "digits": (b"a: 1\nb: " + b"9" * 5000, ", line 2", "9...` cannot be read as !!int"),
    "an octal number": (b"a: 010\n", ", line 1", "`010` is an octal number in YAML; write a"),
    "an octal number of YAML 1.2": (b"a: 0o17\n", ", line 1", "`0o17` is an octal number in YAML"),
    "an octal name": (b"runs:\n  -010: {}\n", ", line 2", "put it in quotes"),
    "minutes": (b"a: 1:30\n", ", line 1", "`1:30` is a number to base 60 in YAML"),
    "no character": (b'a: 1\nb: "\\UFFFFFFFF"\n', ", line 2", "a character there does not exist"),
    "lists in lists": (b"a:\n- " + b"[" * 5000, ", line 2", "is nested too deeply"),
    "dashes": (b"a:\n" + b"- " * 5000 + b"x\n", ", line 2", "is nested too deeply"),
    "a circle": (b"a: &b\n  c: *b\n", ", line 2", "`*b` stands inside of what it repeats"),
    "a merged circle": (b"a: &b\n  <<: *b\n", ", line 2", "`*b` stands inside of what it repeats"),
    "a billion laughs": (LAUGHS, ", line 6", "this is more than 100000 values"),
    "merges of merges": (MERGES, ", line 6", "this is more than 100000 values"),
    "a ladder": (LADDER, ", line 50", "or 50 levels"),
    "a number for a key": (b"a: 1\nb: {012: x}\n", ", line 2", 'put it in quotes: "012"'),
    "a truth for a key": (b"a: 1\non: x\n", ", line 2", "`on` is no text in YAML; put it in quo"),
    "two colons": (b"a: 1\nb: a cat: asleep\n", ", line 2", "a text with `: `, or one that begins"),
    "Windows": (b'a: 1\nb: "C:\\Users"\n', ", line 2", "write / in place of \\, or use single"),
    "a merge of nothing": (b"a: 1\n<<: 3\n", ", line 2", "expected a mapping or list of mappings"),
    "a template": (b"a: 1\n__use_yte__: true\n", ", line 2", "`__use_yte__` would run Python code"),
    "a merged template": (b"a: &a {__use_yte__: 1}\n<<: *a\n", ", line 1", "would run Python code"),
    "two documents": (b"a: 1\n---\nb: 1\n", ", line 2", "single document"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_the_file_and_its_line(name: str, tmp_path: Path) -> None:
    data, line, expected = MISTAKES[name]
    path = tmp_path / "mine.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        check_file(path)
    text = str(caught.value)
    assert text.startswith(f"{path}{line}: ") and expected in text and "\n" not in text
    assert "; " in text


def test_what_is_valid_is_taken(tmp_path: Path) -> None:
    for name, data in {
        "a.yaml": b"x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}\n'012': [*x, *x]\n",
        "b.yaml": "\ufeffa: Kätzchen\n".encode(),
        "numbers.yaml": b"a: [0, -0, 0.5, 1e-4, 1_000, 0x10, 08, '010', \"1:30\", !!str 010]\n",
        "c.json": b'{\n  "a": {"b": 1}\n}',
    }.items():
        (tmp_path / name).write_bytes(data)
        check_file(tmp_path / name)


def test_a_configuration_runs_no_code_of_its_own(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')"
    own = tmp_path / "own.yaml"
    own.write_text(f"__use_yte__: true\n__definitions__:\n  - {code}\na: ?{code}\n")
    command = ["-m", "snakemake", "--configfile", str(own), "-n", "--cores", "1"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "ran").exists()
    assert done.returncode and "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"error: {own}, line 1: `__use_yte__` would run Python code")


def exits(*arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        check_command(arguments)
    return str(caught.value)


def test_a_file_that_cannot_be_read_is_named_with_what_to_do(working: Path) -> None:
    Path("own.yaml").write_text("a: 1\n")
    line = exits("-n", "--configfile", "owm.yaml", "--cores", "1")
    assert line.startswith("error: owm.yaml: there is no such file in ")
    line = exits("--cores", "1", "--configfile", "own.yaml", "train_cats")
    assert line.startswith("error: train_cats: ") and "write it before --configfile" in line
    assert "Is a directory" in exits("--configfiles", str(working))
    if os.geteuid():  # root may read all
        Path("own.yaml").chmod(0)
        assert "Permission denied" in exits("--configfile", "own.yaml")
    check_command(["-n", "train_cats", "--config", "a=1", "-c", "1"])
    with pytest.raises(SystemExit, match="name your configuration by --configfile FILE"):
        check_files(["config/config.yaml"])


FIRST = """\
fill: &fill {fit: crop, enlarge: 2}
datasets:
  cats:
    <<: *fill
    path: cats
    fit: pad
runs:
  v1.5: {model: flux}
  v1:
    model: flux
    resolutions: [512,
      513]
"""
SECOND = """{"runs": {"v1": {
  "model": "sdxl"}}}
"""
PLACES = {
    "runs.v1.resolutions.1": "first.yaml, line 12",
    "runs.v1.resolutions": "first.yaml, line 11",
    "runs.v1.model": "more/second.json, line 2",
    "runs.v1.missing": "first.yaml, line 9",
    "runs.v1.5.missing.path": "first.yaml, line 8",
    "datasets.cats.fit": "first.yaml, line 6",
    "datasets.cats.enlarge": "first.yaml, line 1",
    "runs.v1.trainer.kind": "--config",
}


def test_a_key_has_the_line_of_the_last_place_that_sets_it(working: Path) -> None:
    Path("more").mkdir()
    Path("first.yaml").write_text(FIRST)
    Path("more/second.json").write_text(SECOND)
    files = [working / "first.yaml", "more/second.json"]
    places = Places(files, {"runs": {"v1": {"trainer": {"rank": 4}}}})
    assert {key: places.of(key) for key in PLACES} == {
        key: f"{place}, {key}" for key, place in PLACES.items()
    }
    assert places.of("models.flux.vae") == "first.yaml, models.flux.vae"
    assert places.of("data/cats/a.png") == "data/cats/a.png"
    assert Places().of("runs.v1") == "runs.v1"


def test_each_of_several_mistakes_has_its_line(working: Path) -> None:
    file = working / "mine.yaml"
    file.write_text(
        "datasets: {cats: {path: cats}}\nmodels: {tiny: {vae: x, text: x}}\nruns:\n  a:\n    b: 1\n"
    )
    with pytest.raises(ConfigError) as caught, opened([file], None):
        pass
    lines = [line.partition(": ")[0] for line in str(caught.value).split(" | ")]
    assert "mine.yaml, line 4, runs.a.model" in lines
    assert "mine.yaml, line 5, runs.a.b" in lines
