"""Write the generated files; see the docstring of the package."""

from __future__ import annotations

from reference import ROOT, files

__all__: list[str] = []

(ROOT / "docs/reference").mkdir(exist_ok=True)
for name, text in files().items():
    (ROOT / name).write_text(text, encoding="utf-8")
