"""Names of one folder under Linux, WSL and Windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from latentmake.files.workspace import absolute, is_windows, translate

MAPS = [
    {"linux": "/data", "windows": "E:\\Daten", "wsl": "/mnt/e/Daten"},
    {"linux": "/data/models", "windows": "\\\\nas\\models"},
    {"wsl": "/home/u", "windows": "\\\\wsl.localhost\\Ubuntu\\home\\u\\"},
    {"linux": "/srv/drive", "wsl": "/mnt/f"},
]


@pytest.mark.parametrize(
    ("path", "linux", "windows", "wsl"),
    [
        ("/data/a b.png", "/data/a b.png", "E:/Daten/a b.png", "/mnt/e/Daten/a b.png"),
        ("/data", "/data", "E:/Daten", "/mnt/e/Daten"),
        ("/database", "/database", None, "/database"),  # whole components
        ("/Data/x", "/Data/x", None, "/Data/x"),  # case counts
        ("/data/models/v", "/data/models/v", "//nas/models/v", "/mnt/e/Daten/models/v"),  # longest
        ("/mnt/e/Daten/x", "/data/x", "E:/Daten/x", "/mnt/e/Daten/x"),
        ("/mnt/e/other", "/mnt/e/other", "E:/other", "/mnt/e/other"),
        ("/mnt/f/x", "/srv/drive/x", "F:/x", "/mnt/f/x"),
        ("/mnt/d", "/mnt/d", "D:/", "/mnt/d"),
        ("/mnt/disk/x", "/mnt/disk/x", None, "/mnt/disk/x"),
        ("/home/u/x", "/home/u/x", "//wsl.localhost/Ubuntu/home/u/x", "/home/u/x"),
        ("e:\\daten\\X", "/data/X", "E:/Daten/X", "/mnt/e/Daten/X"),  # case does not count
        ("D:\\x\\y", "/mnt/d/x/y", "D:/x/y", "/mnt/d/x/y"),
        ("D:/", "/mnt/d", "D:/", "/mnt/d"),
        ("D:", "/mnt/d", "D:/", "/mnt/d"),
        ("\\\\NAS\\Models\\v", "/data/models/v", "//nas/models/v", None),
        ("//other/share", None, "//other/share", None),
        ("/data/./a//b/../c/", "/data/a/c", "E:/Daten/a/c", "/mnt/e/Daten/a/c"),
        ("/", "/", None, "/"),
    ],
)
def test_names_of_each_system(
    path: str, linux: str | None, windows: str | None, wsl: str | None
) -> None:
    assert translate(path, "linux", MAPS) == linux
    assert translate(path, "windows", MAPS) == windows
    assert translate(path, "wsl", MAPS) == wsl


def test_a_root_can_be_mapped_and_drives_still_win() -> None:
    maps = [{"linux": "/", "windows": "//wsl.localhost/Ubuntu/"}]
    assert translate("/home/u", "windows", maps) == "//wsl.localhost/Ubuntu/home/u"
    assert translate("/mnt/d/u", "windows", maps) == "D:/u"
    assert translate("//WSL.localhost/ubuntu/home/u", "linux", maps) == "/home/u"
    assert translate("X:/a", "linux", [{"linux": "/mnt/x", "windows": "X:"}]) == "/mnt/x/a"


def test_a_map_wins_over_a_drive_of_the_same_length_and_the_first_over_the_second() -> None:
    maps = [{"linux": "/mnt/d", "windows": "Z:"}, {"linux": "/mnt/d", "windows": "Y:"}]
    assert translate("/mnt/d/x", "windows", maps) == "Z:/x"


component = st.text(
    st.characters(
        exclude_characters='/\\:*?"<>|\0', exclude_categories=["Cs", "Cc"], max_codepoint=0x2FFF
    ),
    min_size=1,
    max_size=8,
).filter(lambda text: text not in (".", "..") and not text.startswith("mnt"))
components = st.lists(component, max_size=5)


@given(letter=st.sampled_from("abcdxyz"), rest=components)
def test_drives_there_and_back(letter: str, rest: list[str]) -> None:
    path = "/".join(["/mnt", letter, *rest])
    windows = translate(path, "windows", [])
    assert windows is not None and windows.startswith(f"{letter.upper()}:/")
    assert translate(windows, "wsl", []) == translate(windows, "linux", []) == path
    assert translate(windows.replace("/", "\\"), "wsl", []) == path


@given(
    st.dictionaries(component, components, min_size=1, max_size=4),
    st.data(),
    components,
    st.sampled_from(["D:", "//server/share"]),
)
def test_maps_there_and_back(
    prefixes: dict[str, list[str]], data: st.DataObject, rest: list[str], root: str
) -> None:
    maps = [
        {"linux": "/".join(["", first, *more]), "windows": f"{root}/{number}"}
        for number, (first, more) in enumerate(prefixes.items())
    ]
    chosen = data.draw(st.sampled_from(maps))
    path = "/".join([str(chosen["linux"]), *rest])
    windows = translate(path, "windows", maps)
    assert windows == "/".join([str(chosen["windows"]), *rest])
    assert translate(windows, "linux", maps) == path
    shouted = windows.replace(root, root.swapcase(), 1).replace("/", "\\")
    assert translate(shouted, "linux", maps) == path


@given(components)
def test_linux_knows_its_own_paths_and_windows_does_not(rest: list[str]) -> None:
    path = "/".join(["/home", *rest])
    assert translate(path, "linux", []) == translate(path, "wsl", []) == path
    assert translate(path, "windows", []) is None


@pytest.mark.parametrize(
    ("path", "windows"),
    [
        *((path, True) for path in ("D:\\x", "d:/x", "\\\\s\\x", "//s/x")),
        *((path, False) for path in ("/x", "x", "C:x", "\\x", "")),
    ],
)
def test_what_is_a_path_of_windows(path: str, windows: bool) -> None:
    assert is_windows(path) is windows


def test_absolute_leaves_windows_alone(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(folder)
    assert absolute("a/../b") == f"{folder}/b"
    assert absolute("D:\\x") == "D:\\x"
