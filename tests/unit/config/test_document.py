"""Each mistake in the text of a configuration file is one line with the file and its line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from latentmake.config.document import check_command, check_file, check_files
from latentmake.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]

MISTAKES: dict[str, tuple[bytes, str, str]] = {
    "a key twice": (
        b"runs:\n  a: {}\n  b: {}\n  a: {}\n",
        ", line 4",
        "the key `a` occurs twice, first in line 2",
    ),
    "a section twice": (b"runs: {}\nmodels: {}\nruns: {}\n", ", line 3", "`runs` occurs twice"),
    "a tab": (b"runs:\n\ta: 1\n", ", line 2", "a tab stands where YAML wants spaces"),
    "brackets": (b"runs: {}\nmodels: {a: [b}}\n", ", line 2", "expected ',' or ']', but got '}'"),
    "a quote": (b"runs:\n  a: 'b\n", ", line 3", "check brackets, quotes"),
    "a list": (b"# mine\n- a\n- b\n", "", "has no sections"),
    "nothing": (b"", "", "is empty"),
    "a comment": (b"# datasets\n", "", "is empty"),
    "Latin-1": ("a: 1\nb: Kätzchen\n".encode("latin-1"), ", line 2", "0xe4 is not UTF-8"),
    "UTF-16": ("a: 1\n".encode("utf-16"), ", line 1", "save it in UTF-8"),
    "a zero byte": (b"a: 1\nb: x\0y\n", ", line 2", "U+0000 is not allowed"),
    "a list for a key": (b"a: 1\n? [b]\n: c\n", ", line 2", "a key is a list or section"),
    "a tag": (b"a: !!python/name:os.system\n", ", line 1", "could not determine a constructor"),
    "a merge of nothing": (b"a: 1\n<<: 3\n", ", line 2", "expected a mapping or list of mappings"),
    "a template": (b"a: 1\n__use_yte__: true\n", ", line 2", "`__use_yte__` would run Python code"),
    "a merged template": (b"a: &a {__use_yte__: 1}\n<<: *a\n", ", line 1", "would run Python code"),
    "two documents": (b"a: 1\n---\nb: 1\n", ", line 2", "single document"),
    "a JSON list": (b"[1, 2]", "", "has no sections"),
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
        "a.yaml": b"x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}\nz: [*x, *x]\n",
        "b.yaml": "\ufeffa: Kätzchen\n".encode(),
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


def test_a_file_that_cannot_be_read_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("a: 1\n")
    line = exits("-n", "--configfile", "owm.yaml", "--cores", "1")
    assert line.startswith("error: owm.yaml: there is no such file in ")
    line = exits("--cores", "1", "--configfile", "own.yaml", "train_cats")
    assert line.startswith("error: train_cats: ") and "write it before --configfile" in line
    assert "Is a directory" in exits("--configfiles", str(tmp_path))
    if os.geteuid():  # root may read all
        Path("own.yaml").chmod(0)
        assert "Permission denied" in exits("--configfile", "own.yaml")
    check_command(["-n", "train_cats", "--config", "a=1", "-c", "1"])
    with pytest.raises(SystemExit, match="name your configuration by --configfile FILE"):
        check_files(["config/config.yaml"])
