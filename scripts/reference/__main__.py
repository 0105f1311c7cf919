"""Write the generated files; see the docstring of the package.

With the kind of a trainer that another package brings, print the page of its settings.
"""

from __future__ import annotations

import sys

from latentmake.config.trainers import installed

from reference import ROOT, files
from reference.pages import Page, text

__all__: list[str] = []

if kinds := sys.argv[1:]:
    for kind in kinds:
        settings = installed()[kind].load().settings
        sys.stdout.write(text(Page(f"trainer-{kind}", settings, "runs.NAME.trainer")))
else:
    (ROOT / "docs/reference").mkdir(exist_ok=True)
    for name, content in files().items():
        (ROOT / name).write_text(content, encoding="utf-8")
