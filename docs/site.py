"""Gather the pages of the site from docs/ and other folders, with all files that they link to.

Each page is named by its path from the top of the repository, so that links between folders lead to
the same files here and in a repository browser.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "docs/**/*.md", "config/**/*.md")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name headings as repository browsers do: one `-` a space."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of `docs_dir` by the pages, and the files that they link to."""
    files = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    found = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    for path in found:
        files.append(_file(path, config))
        if path.suffix == ".md":
            found += [each for each in _linked(path) if each not in found]
    return files


def _file(path: Path, config: MkDocsConfig) -> File:
    name = path.relative_to(ROOT).as_posix()
    file = File(name, str(ROOT), config.site_dir, use_directory_urls=False)
    file.dest_uri = file.dest_uri.removeprefix("docs/")
    return file


def _linked(page: Path) -> set[Path]:
    """Files of the repository that a page links to, or shows as pictures."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    paths = {(page.parent / link).resolve() for link in links if "://" not in link}
    return {path for path in paths if path.is_file() and path.is_relative_to(ROOT)}
