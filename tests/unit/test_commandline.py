"""A command line of Snakemake tells whether jobs are started, where, and what a module is asked."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from latentmake import commandline
from latentmake.commandline import deletes, is_remote, needs_plan, only_asks, own_rules, own_targets
from snakemake import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    return tmp_path


def test_each_command_of_snakemake_that_starts_no_job_is_known() -> None:
    """Snakemake decides in this chain of conditions; what comes before its end executes nothing."""
    source = inspect.getsource(cli.args_to_api)
    chain = source[source.index("if args.lint") : source.index("# Determine the pseudo-executor")]
    found = {*re.findall(r"\n +(?:el)?if args\.(\w+)(?: is not None)?:\n", f"\n {chain}")}
    found = found - {"preemptible_rules"} | {"dryrun"}
    assert len(found) > 20 and found == {*commandline._WITHOUT_JOBS.split()}


@pytest.mark.parametrize(
    ("words", "asks", "plans"),
    [
        ("", False, True),
        ("train_a --forceall", False, True),
        ("--touch", False, True),
        ("--report r.html --report-after-run", False, True),
        ("--report r.zip", True, True),
        ("-n", True, True),
        ("--touch -n", True, True),
        ("--summary", True, True),
        ("--dag mermaid-js", True, True),
        ("--rulegraph", True, True),
        ("--list-changes code", True, True),
        ("--containerize apptainer", True, True),
        ("--generate-unit-tests", True, True),
        ("--delete-all-output", True, True),
        ("--lint", True, False),
        ("--list", True, False),
        ("--unlock", True, False),
        ("--cleanup-metadata a", True, False),
    ],
)
def test_a_command_that_starts_no_job_only_asks(words: str, asks: bool, plans: bool) -> None:
    options = commandline.read(words.split())
    assert (only_asks(options), needs_plan(options)) == (asks, plans)


def test_a_dry_run_deletes_nothing() -> None:
    assert deletes(commandline.read(["--delete-all-output"]))
    assert not deletes(commandline.read(["--delete-all-output", "-n"]))


@pytest.mark.parametrize(
    ("words", "remote"),
    [
        ("", False),
        ("--jobs 5", False),
        ("--executor local --cores 2", False),
        ("--executor touch", False),
        ("--executor slurm --cores 2 -n", True),
        ("--profile site --summary", True),
        ("--profile site --executor local", False),
    ],
)
def test_the_executor_tells_whether_jobs_run_on_a_cluster(words: str, remote: bool) -> None:
    site = Path("site/config.yaml")
    site.parent.mkdir()
    site.write_text("{executor: slurm, jobs: 5, cores: 2}")
    assert is_remote(commandline.read(words.split())) is remote


def test_a_profile_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("site").mkdir()
    Path("site/config.yaml").write_text("executor: slurm")
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "site")
    assert is_remote(commandline.read(["-n"]))


@pytest.mark.parametrize("name", ["default", "slurm"])
def test_a_profile_is_plain_yaml(name: str) -> None:
    values = yaml.safe_load((ROOT / f"profiles/{name}/config.yaml").read_text())
    assert not [key for key in values if not re.fullmatch(r"[a-z-]+", key)]


@pytest.mark.parametrize(
    ("pattern", "targets", "asked"),
    [
        ("lm_*", ["lm_train_a", "lm_caches_b_c"], ["train_a", "caches_b_c"]),
        ("*_of_lm", ["text_a_of_lm"], ["text_a"]),
        ("*", ["train_a", "all"], ["train_a", "all"]),
        ("lm_*", ["cache/d/m/64/x.safetensors", "runs/a/trained.json"], None),
        # What the user's own rules need is not known before the graph is.
        ("lm_*", ["figures", "train_a", "figures/a.png", "lm_all"], ["all"] * 4),
        ("*", ["text_statistics"], ["all"]),
        ("final", ["final"], ["all"]),
        ("lm_*", [], []),
    ],
)
def test_targets_of_a_modules_user_are_those_of_the_module(
    pattern: str, targets: list[str], asked: list[str] | None
) -> None:
    found = own_targets(targets, lambda name: pattern.replace("*", name), {"a": 1, "b_c": 2})
    assert found == (targets if asked is None else asked)


def test_a_job_on_a_cluster_knows_the_rules_of_a_module() -> None:
    names = ["lm_encode_text_a_0", "figures"]
    assert own_rules(names, "lm_{}".format) == ["encode_text_a_0"]


MODULE = """
import sys
sys.path.insert(0, {scripts!r})
from latentmake.commandline import add_handlers, is_module
onstart: print("module starts")
onsuccess: print("module ends")
onerror: print("module fails")
if is_module(workflow):
    add_handlers(workflow, onstart=onstart, onsuccess=onsuccess, onerror=onerror)
rule one:
    output: touch("one")
rule two:
    output: touch("two")
"""
USER = """
onstart: print("user starts")
module other:
    snakefile: "module.smk"
use rule * from other as lm_*
use rule one from other as lm_one with:
    threads: 1
onsuccess: print("user ends")
"""


def test_handlers_of_a_module_are_called_once_before_those_of_its_user(
    folder: Path, run: Callable[..., str]
) -> None:
    (folder / "module.smk").write_text(MODULE.format(scripts=str(ROOT / "scripts")))
    (folder / "Snakefile").write_text(USER)
    output = run("--cores", "1", "lm_two")
    assert re.findall(r"^(?:user|module) \w+$", output, re.MULTILINE) == [
        "module starts",
        "user starts",
        "module ends",
        "user ends",
    ]


@pytest.fixture
def run(folder: Path) -> Callable[..., str]:
    def snakemake(*words: str) -> str:
        command = [sys.executable, "-m", "snakemake", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return snakemake
