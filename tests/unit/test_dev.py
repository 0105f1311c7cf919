"""The developers' command chooses tests by the imports of modules."""

from __future__ import annotations

import by_path
import pytest

dev = by_path.load("scripts/dev")


def chosen(*names: str) -> tuple[set[str], set[str]]:
    own, users = dev.tests_of([dev.ROOT / name for name in names])
    return {path.name for path in own}, {path.name for path in users}


def test_a_module_has_the_tests_that_import_it_and_those_of_its_users() -> None:
    own, users = chosen("scripts/latentmake/geometry/buckets.py")
    assert "test_buckets.py" in own
    assert "test_errors.py" not in own | users
    assert not own & users


def test_a_test_of_the_name_and_place_of_a_module_is_its_test() -> None:
    assert "test_progress.py" in chosen("scripts/latentmake/base/progress.py")[0]


def test_a_module_that_many_import_has_more_tests_than_quick_runs() -> None:
    own, users = chosen("scripts/latentmake/base/errors.py")
    assert len(own) + len(users) > dev.MOST


def test_a_changed_test_is_run_itself_and_a_page_has_no_tests() -> None:
    name = "tests/workflow/test_kill.py"
    assert chosen(name, "README.md", "scripts/latentmake/gone.py") == ({"test_kill.py"}, set())


@pytest.mark.parametrize("words", [[], ["bench", "nothing_of_that_name"], ["tests"]])
def test_an_unknown_word_prints_the_words(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert dev.main(words) == 2
    assert "scripts/dev quick" in capsys.readouterr().err
