"""The documentation names what there is: links, headings, files, modules, configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from latentmake.config.root import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "config").rglob("*.md")]
)
FOLDERS = (ROOT, ROOT / "scripts", ROOT / "scripts/latentmake")
ENDINGS = (".py", ".smk", ".lock", ".json", ".yaml", ".md")
SOURCES = ROOT / "docs/how-it-works/peers.md"
"""Sources of sentences about other trainers."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def headings_as_written(page: Path) -> set[str]:
    return {*re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)}


@each_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        assert target.is_file(), link
        assert not heading or heading in headings(target), link


@each_page
def test_files_and_modules_of_the_project_exist(page: Path) -> None:
    text = page.read_text()
    named = [word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()]
    named += re.findall(r"\b(?:tests|envs|docs|scripts|rules)/[\w./-]+", text)
    ours = ("tests/", "envs/", "docs/", "scripts/", "rules/", "config/", "profiles/")
    package = {path.name for path in (ROOT / "scripts/latentmake").iterdir()}
    layers = tuple(f"{name}/" for name in package - {"runs"})  # users have a folder `runs`, too
    for name in named:
        whole = name.endswith(("/", *ENDINGS)) and not set(name) & set("*{}<>")
        if whole and name.startswith((*ours, *layers)):
            assert any((folder / name).exists() for folder in FOLDERS), name
    for module in re.findall(r"\blatentmake(?:\.[a-z_]+)+\b", text):
        place = ROOT / "scripts" / module.replace(".", "/")
        # Keys in the headers of cache files, and a group of entry points.
        keys = ("adopted", "checksum", "header_checksum", "trainers")
        is_key = module.removeprefix("latentmake.") in keys
        assert is_key or place.is_dir() or place.with_suffix(".py").is_file(), module


@each_page
def test_whole_configurations_are_accepted(page: Path) -> None:
    for block in re.findall(r"```yaml[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
        values = yaml.safe_load(block)
        assert "runs" not in values or parse(values)


@each_page
def test_tables_beside_other_trainers_lead_to_their_sources(page: Path) -> None:
    compared = False
    for head in re.findall(r"^\|(.+)\|\n\|-", page.read_text(), re.MULTILINE):
        names = {cell.split(" with ")[0].strip() for cell in head.split("|")}
        if "Latentmake" in names:
            assert names - {"Latentmake", "", "you do this"} <= headings_as_written(SOURCES), head
            compared = True
    assert not compared or page == SOURCES or SOURCES.name in page.read_text()


def test_the_sources_of_each_trainer_have_a_commit_and_a_month() -> None:
    rows = re.findall(
        r"^\| \[([\w-]+)\]\(https.*\| ([0-9a-f, ]{7,}) \| (.+) \|$", SOURCES.read_text(), re.M
    )
    assert {name for name, *_ in rows} == headings_as_written(SOURCES)
    assert all(re.search(r"[A-Z][a-z]+ 20\d\d$", month) for *_, month in rows)


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs").rglob("*.png"))
    assert pictures and sum(path.stat().st_size for path in pictures) < 300_000
