"""The site of the documentation: links answer, pages fit a phone, and read as in a repository."""

from __future__ import annotations

import html.parser
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from browser import Browser, until
from markdown_it import MarkdownIt
from selenium.webdriver.common.by import By

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ("li", "pre", "table", "tr", "h1", "h2", "h3", "img", "blockquote", "ol")
"""Elements of which a page has as many here as in a repository browser."""
WIDTHS = (1280, 390)
WIDE = """
const width = document.documentElement.clientWidth;
return document.documentElement.scrollWidth > width ? document.documentElement.scrollWidth : 0;
"""


class Page(html.parser.HTMLParser):
    """Links and anchors of a page, and the elements of its article."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.elements: Counter[str] = Counter()
        self._inside = "<article" not in text
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self._inside |= tag == "article"
        self.elements[tag] += self._inside
        self.anchors.add(values.get("id") or "")
        self.links += [values[name] or "" for name in ("href", "src") if name in values]

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "article"


class Quiet(SimpleHTTPRequestHandler):
    """A server that keeps no log."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()


def pages(site: Path) -> dict[str, Page]:
    found = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}
    return {name: Page(path.read_text()) for name, path in sorted(found.items())}


def test_every_link_leads_to_a_file_and_an_anchor_of_the_site(site: Path) -> None:
    found = pages(site)
    assert len(found) > 20
    for name, page in found.items():
        for link in page.links:
            target = urlsplit(urljoin(f"http://site/{name}", link))
            if target.netloc != "site":
                assert "/assets/" not in link and target.scheme in ("http", "https", "mailto"), link
                continue
            path = site / unquote(target.path.lstrip("/"))
            path = path / "index.html" if path.is_dir() else path
            assert path.is_file(), f"{name}: {link}"
            other = found.get(path.relative_to(site).as_posix())
            if other and target.fragment and not target.fragment.startswith("__"):
                assert unquote(target.fragment) in other.anchors, f"{name}: {link}"


def test_a_page_has_the_same_lists_tables_and_blocks_as_in_a_repository(site: Path) -> None:
    """Python-Markdown wants blank lines before lists, and deeper indentation in them."""
    render = MarkdownIt().enable("table").render
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("config/**/*.md")]
    for source in sources:
        name = source.relative_to(ROOT).as_posix().removeprefix("docs/")
        name = name.replace("README.md", "index.md").removesuffix(".md")
        there, here = Page(render(source.read_text())), Page((site / f"{name}.html").read_text())
        expected = {tag: there.elements[tag] for tag in SHAPES}
        assert {tag: here.elements[tag] for tag in SHAPES} == expected, source


def test_every_page_fits_its_window_and_the_browser_has_no_complaint(
    site: Path, address: str, browser: Browser
) -> None:
    for width in WIDTHS:
        with browser.window(width, 900):
            for name in pages(site):
                browser.visit(f"{address}{name}")
                assert not browser.run(WIDE), f"{name} is wider than {width}"
                assert browser.complaints() == [], name


def test_the_search_finds_a_message_and_asks_no_other_server(
    address: str, browser: Browser
) -> None:
    with browser.window(1280, 900):
        browser.visit(address)
        browser.driver.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys("tokenizer")
        until(lambda: browser.all(".md-search-result__item a"))
        hosts = browser.run(
            "return performance.getEntriesByType('resource').map((each) => new URL(each.name).host)"
        )
        assert {*hosts} == {urlsplit(address).netloc}
        assert browser.complaints() == []
