"""Sources of programs are found again by a digest, and a changed one is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from latentmake.plan import programs


def test_what_a_header_says_leads_to_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    programs.keep("ab", "musubi-tuner", {"a.py": "1"})
    Path("other.json").write_text(json.dumps({"name": "x", "files": {}}))
    assert programs.program_of("ab") == ("musubi-tuner", {"a.py": "1"})
    assert programs.program_of("../../other") is None
    Path(".latentmake/programs/ab.json").write_text("[]")
    assert programs.program_of("ab") is None


def test_new_and_missing_files_count_as_changed() -> None:
    before = programs.Program("musubi-tuner", {"a.py": "1", "b.py": "2", "c.py": "3"})
    now = programs.Program("musubi-tuner", {"a.py": "1", "b.py": "4", "d.py": "3"})
    assert programs.changed(before, now) == ["b.py", "c.py", "d.py"]
    assert programs.changed(now, now) == []
