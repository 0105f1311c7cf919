"""Writes a report as one HTML page that needs nothing else: no network, no other file.

What the page shows is data (JSON), put there by a script as texts and never as markup. A policy
within the page allows that one script, that one style sheet and embedded pictures, nothing more.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from latentmake import digest

__all__ = ["Side", "View", "page", "render", "state_in", "template_digest"]

_FOLDER = Path(__file__).parent
_HEAD = 4096  # bytes of a page within which its state stands
_STATE = re.compile(rb'<meta name="latentmake-state" content="([0-9a-f]{64})">')


class Side(NamedTuple):
    """A run or a folder, beside others.

    Attributes:
        name: what it is called.
        kind: `run` or `folder`.
        cells: row -> step (in digits, or `*` for all) -> number of a picture, or what is wrong
            with it.
    """

    name: str
    kind: str
    cells: list[dict[str, int | str]]


class View(NamedTuple):
    """All that a page shows.

    Attributes:
        title: of the page.
        sides: what is compared.
        rows: prompts, or names of pictures.
        rows_are: `prompt` or `picture`.
        steps: of all runs, ascending; none where folders alone are compared.
        pictures: data URI, width and height in pixels, and whether it is shown pixel by pixel.
        runs: whose settings are compared.
        settings: (name, a text for each run).
    """

    title: str
    sides: list[Side]
    rows: list[str]
    rows_are: str
    steps: list[int]
    pictures: list[tuple[str, int, int, bool]]
    runs: list[str]
    settings: list[tuple[str, list[str]]]


@functools.cache
def _parts(kind: str) -> dict[str, str]:
    """Return markup, style and script of a kind of page: `compare` or `captions`."""
    html_, script, *styles = (
        (_FOLDER / name).read_text(encoding="utf-8").strip()
        for name in (f"{kind}.html", f"{kind}.js", "page.css", f"{kind}.css")
    )
    return {"page": html_, "style": "\n".join(styles), "script": script}


def template_digest() -> str:
    """Return the digest of all that comparisons have in common."""
    return digest.of_value(_parts("compare"))


def _fingerprint(text: str) -> str:
    """Name a script or a style sheet as a content security policy does (W3C CSP3, section 2.3)."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _data(values: Any) -> str:
    """Return values as JSON that cannot end the element it stands in."""
    text = json.dumps(values, separators=(",", ":"))  # everything beyond ASCII is escaped
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def render(view: View, state: str) -> str:
    """Return the page of a comparison.

    Args:
        view: what it shows.
        state: digest of all that it was made of.
    """
    values = {**view._asdict(), "sides": [side._asdict() for side in view.sides]}
    return page("compare", view.title, values, state)


def page(kind: str, title: str, data: Any, state: str = "") -> str:
    """Return a page.

    Args:
        kind: `compare` or `captions`.
        title: of the page.
        data: what its script shows, of what JSON knows.
        state: digest of all that it was made of, if anybody asks for it.
    """
    parts = _parts(kind)
    policy = (
        f"default-src 'none'; img-src data:; style-src {_fingerprint(parts['style'])}; "
        f"script-src {_fingerprint(parts['script'])}; base-uri 'none'; form-action 'none'"
    )
    values = {
        "title": html.escape(title),
        "state": html.escape(state),
        "policy": html.escape(policy, quote=False).replace('"', "&quot;"),
        "style": parts["style"],
        "script": parts["script"],
        "data": _data(data),
    }
    # In one pass: what is put in is not looked through for places to put something.
    return re.sub(r"@@(\w+)@@", lambda match: values[match[1]], parts["page"]) + "\n"


def state_in(path: Path) -> str | None:
    """Return the state that a page was made of; None where there is no page of ours."""
    try:
        with path.open("rb") as file:
            match = _STATE.search(file.read(_HEAD))
    except OSError:
        return None
    return match[1].decode() if match else None
