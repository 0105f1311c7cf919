"""The server that edits captions: whom it answers, what it writes, and what it never loses."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import made_caption_world
import pytest
from latentmake.commands import caption_editor
from latentmake.runs.history import RosterItem
from made_caption_world import DATA, config, facts_of, served, write_made

MADE = {"ant": "a red circle, made", "bee": "a blue square, made"}
Answer = dict[str, Any]


@pytest.fixture(autouse=True)
def _world(tmp_path: Path, micro: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_caption_world.lay(micro, monkeypatch, tmp_path)
    write_made(facts_of(config()), MADE)


class Window:
    """A page of the server in one window: what it asks, and what it was told."""

    def __init__(self, address: str) -> None:
        self.parts = urlsplit(address)
        self.captions: dict[str, Answer] = {}
        self.version, self.last = -1, None
        self.learn(self.get("load"))

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Send a request to an absolute path, and return its status and content."""
        connection = http.client.HTTPConnection(self.parts.netloc, timeout=30)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, body, names)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def get(self, name: str) -> Answer:
        status, content = self.ask("GET", self.parts.path + name)
        assert status == 200, content
        result: Answer = json.loads(content)
        return result

    def post(self, name: str, **values: Any) -> tuple[int, Answer]:
        body = json.dumps(values).encode()
        kind = {"Content_Type": "application/json"}
        status, content = self.ask("POST", self.parts.path + name, body, **kind)
        result = json.loads(content)
        if status == 200:
            self.learn(result)
        return status, result

    def learn(self, answer: Answer) -> None:
        self.captions |= {caption["stem"]: caption for caption in answer.get("captions", ())}
        self.version = answer.get("version", self.version)
        self.last = answer.get("undo", self.last)

    def save(self, stem: str, text: str) -> tuple[int, Answer]:
        base = self.captions[stem]["base"]
        return self.post("save", dataset="shapes", stem=stem, text=text, base=base)

    def back(self, stem: str) -> tuple[int, Answer]:
        return self.post("back", dataset="shapes", stem=stem, base=self.captions[stem]["base"])

    def replace(self, find: str, put: str, preview: str = "", **more: bool) -> tuple[int, Answer]:
        options = {"words": False, "case": True, "made": False} | more
        return self.post("replace", find=find, put=put, preview=preview, **options)

    def undo(self) -> tuple[int, Answer]:
        assert self.last
        return self.post("undo", number=self.last[0])

    def work(self) -> str:
        """Return the line about the next build, once it is there."""
        end = time.monotonic() + 60
        while not (line := self.get(f"state?since={self.version}")["work"]):
            assert time.monotonic() < end
            time.sleep(0.05)
        return str(line)


@pytest.fixture
def address() -> Iterator[str]:
    with served(facts_of(config())) as address:
        yield address


@pytest.fixture
def window(address: str) -> Window:
    return Window(address)


def files() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path().rglob("*.txt"))}


# -- who is answered ------------------------------------------------------------------------------


def test_requests_of_others_are_refused(window: Window) -> None:
    token, host = window.parts.path, window.parts.netloc
    before = files()
    save = json.dumps({"dataset": "shapes", "stem": "eel", "text": "no", "base": "any"}).encode()
    as_json = {"Content_Type": "application/json"}
    refused = [
        ("GET", "/", None, {}),
        ("GET", "/load", None, {}),
        ("POST", "/save", save, as_json),
        ("GET", f"{token[:-2]}/load", None, {}),
        ("GET", f"/{'x' * 43}/load", None, {}),
        ("GET", f"/{quote('ä' * 43)}/load", None, {}),
        ("GET", f"{token}load", None, {"Host": "evil.example"}),
        ("GET", f"{token}load", None, {"Host": f"evil.example:{window.parts.port}"}),
        ("GET", f"{token}load", None, {"Origin": "http://evil.example"}),
        ("GET", f"{token}load", None, {"Origin": "null"}),
        ("GET", f"{token}load", None, {"Sec_Fetch_Site": "cross-site"}),
        ("GET", f"{token}load", None, {"Sec_Fetch_Site": "same-site"}),
        ("POST", f"{token}save", save, {**as_json, "Origin": "https://127.0.0.1"}),
    ]
    for method, path, body, headers in refused:
        status, content = window.ask(method, path, body, **headers)
        assert (status, content) == (403, b"refused"), (path, headers)
    assert window.ask("POST", f"{token}save", save)[0] == 415
    assert window.ask("POST", f"{token}save", save, Content_Type="text/plain")[0] == 415
    assert window.ask("GET", f"{token}save")[0] == 405
    assert window.ask("GET", f"{token}load", None, Origin=f"http://{host}")[0] == 200
    assert files() == before


def test_a_large_body_is_refused_before_it_is_read(window: Window) -> None:
    tracemalloc.start()
    for size, chunked in ((1_000_001, False), (100_000_000, False), (10, True)):
        connection = http.client.HTTPConnection(window.parts.netloc, timeout=30)
        connection.putrequest("POST", f"{window.parts.path}save")
        connection.putheader("Content-Type", "application/json")
        name, value = ("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(size))
        connection.putheader(name, value)
        connection.endheaders()  # the body never comes
        assert connection.getresponse().status == 413
        connection.close()
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    "stem", ["../../models/secret", "/etc/passwd", "..", "", "eel.png", "eel\0", "shapes/eel"]
)
def test_only_items_of_the_run_are_written_and_shown(window: Window, stem: str) -> None:
    before = files()
    values = {"dataset": "shapes", "stem": stem, "base": ""}
    assert window.post("save", text="no", **values)[0] == 422
    assert window.post("back", **values)[0] == 422
    assert window.post("tokens", dataset="shapes", stem=stem, text="a")[0] == 422
    query = f"picture/small?dataset=shapes&stem={quote(stem)}"
    assert window.ask("GET", window.parts.path + query)[0] == 404
    for path in ("picture/../load", "../load", "%2e%2e/%2e%2e/etc/passwd", "picture/huge"):
        assert window.ask("GET", window.parts.path + path)[0] in (403, 404)
    assert files() == before


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b"\xff", b'{"text": 1}', b"[" * 100_000, b'{"number": 1, "more": 2}'],
)
def test_a_request_that_makes_no_sense_is_one_line(window: Window, body: bytes) -> None:
    for name in ("save", "back", "replace", "undo", "tokens"):
        path, kind = window.parts.path + name, {"Content_Type": "application/json"}
        status, content = window.ask("POST", path, body, **kind)
        assert status == 400
        assert len(json.loads(content)["what"]) < 300


def test_pictures_and_the_page_are_sent_with_safe_headers(window: Window) -> None:
    connection = http.client.HTTPConnection(window.parts.netloc)
    for path, kind in (("", "text/html"), ("picture/large?dataset=shapes&stem=eel", "image/webp")):
        connection.request("GET", window.parts.path + path)
        answer = connection.getresponse()
        assert answer.status == 200 and answer.read()
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
    connection.close()


# -- captions -------------------------------------------------------------------------------------


def test_the_page_knows_written_and_made_captions(window: Window) -> None:
    told = {stem: (own["written"], own["made"], own["by"]) for stem, own in window.captions.items()}
    assert told == {
        "ant": (None, MADE["ant"], "florence"),
        "bee": (None, MADE["bee"], "florence"),
        "cat": (None, None, "florence"),
        "dog": (None, None, "florence"),
        "eel": ("a white circle", None, ""),
        "fox": ("a blue square", None, ""),
    }
    assert window.captions["cat"]["awaits"] and not window.captions["ant"]["awaits"]


def test_a_save_writes_the_file_and_nothing_else(window: Window) -> None:
    window.work()  # the memo is there
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    status, answer = window.save("eel", "a white eel")
    assert (status, answer["done"]) == (200, "saved: caption of eel")
    assert window.save("ant", "mine,\nin two lines")[0] == 200
    window.work()
    after = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    changed = {path for path in after if before.get(path) != after[path]}
    assert {path for path in changed if ".latentmake" not in path.parts} == {
        DATA / "eel.txt", DATA / "ant.txt",
    }  # fmt: skip
    assert {path.name for path in changed if ".latentmake" in path.parts} <= {
        "memo.sqlite", "memo.sqlite-journal",
    }  # fmt: skip
    assert (DATA / "eel.txt").read_bytes() == b"a white eel\n"
    assert (DATA / "ant.txt").read_bytes() == b"mine,\nin two lines\n"
    assert window.captions["ant"]["by"] == ""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"one\r\ntwo\r\n", b"new\r\ntext\r\n"),
        (b"one", b"new\ntext"),
        (b"\xef\xbb\xbfone\n", b"\xef\xbb\xbfnew\ntext\n"),
    ],
)
def test_a_save_keeps_line_ends_and_mark(address: str, before: bytes, after: bytes) -> None:
    (DATA / "eel.txt").write_bytes(before)
    (DATA / "eel.txt").chmod(0o640)
    window = Window(address)
    assert window.save("eel", "new\ntext")[0] == 200
    assert (DATA / "eel.txt").read_bytes() == after
    assert (DATA / "eel.txt").stat().st_mode & 0o777 == 0o640
    assert window.undo()[0] == 200
    assert (DATA / "eel.txt").read_bytes() == before


def test_two_windows_lose_nothing(address: str) -> None:
    one, two = Window(address), Window(address)
    assert one.save("eel", "of the first")[0] == 200
    status, answer = two.save("eel", "of the second")
    assert status == 409
    assert answer["caption"]["written"] == "of the first"
    assert (DATA / "eel.txt").read_text() == "of the first\n"
    two.learn({"captions": [answer["caption"]]})  # the person has seen it, and keeps the own text
    assert two.save("eel", "of both")[0] == 200
    assert one.get(f"state?since={one.version}")["captions"][0]["written"] == "of both"
    assert one.save("ant", "of the first")[0] == 200
    assert two.save("ant", "of the second")[0] == 409
    assert two.back("ant")[0] == 409


def test_an_editor_beside_the_page_loses_nothing(window: Window) -> None:
    (DATA / "eel.txt").write_text("from elsewhere")
    assert window.save("eel", "of the page")[0] == 409
    (DATA / "ant.txt").write_text("from elsewhere")
    assert window.save("ant", "of the page")[0] == 409
    (DATA / "fox.txt").unlink()
    status, answer = window.save("fox", "of the page")
    assert (status, answer["caption"]["base"]) == (409, "")
    assert not (DATA / "fox.txt").exists()
    assert (DATA / "ant.txt").read_text() == (DATA / "eel.txt").read_text() == "from elsewhere"


def test_many_threads_save_one_caption_and_each_save_is_told_the_truth(address: str) -> None:
    windows = [Window(address) for _ in range(8)]
    saved: list[str] = []

    def work(number: int, window: Window) -> None:
        for turn in range(5):
            text = f"text {number} {turn}"
            status, answer = window.save("eel", text)
            if status == 200:
                saved.append(text)
            else:
                window.learn({"captions": [answer["caption"]]})

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(windows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    window = Window(address)
    present = window.captions["eel"]["written"]
    assert present in saved
    for _ in saved:  # each save can be taken back
        assert window.captions["eel"]["written"] in saved
        assert window.undo()[0] == 200
    assert (DATA / "eel.txt").read_text() == "a white circle\n"


def test_an_empty_text_deletes_nothing(window: Window) -> None:
    assert window.save("ant", "mine")[0] == 200
    for stem in ("ant", "eel", "cat"):
        status, answer = window.save(stem, " \n")
        assert (status, answer["what"]) == (
            422,
            "the caption is empty; use Back to the made caption",
        )
    assert window.back("ant")[0] == 200
    assert not (DATA / "ant.txt").exists()
    assert window.captions["ant"]["by"] == "florence"
    assert window.back("ant")[0] == 422
    assert window.undo()[0] == 200
    assert (DATA / "ant.txt").read_text() == "mine\n"


def test_texts_that_no_caption_can_be_are_refused(window: Window) -> None:
    for text, refused in ("a\0b", 422), ("\ud800", 400):
        base = window.captions["eel"]["base"]
        values = {"dataset": "shapes", "stem": "eel", "text": text, "base": base}
        kind, path = {"Content_Type": "application/json"}, window.parts.path + "save"
        assert window.ask("POST", path, json.dumps(values).encode(), **kind)[0] == refused
    assert (DATA / "eel.txt").read_text() == "a white circle\n"


def test_files_that_are_not_a_captions_own_are_not_written(address: str) -> None:
    Path("elsewhere.txt").write_text("of elsewhere")
    (DATA / "eel.txt").unlink()
    (DATA / "eel.txt").symlink_to(Path("elsewhere.txt").absolute())
    (DATA / "fox.txt").write_bytes(b"caf\xe9")
    window = Window(address)
    for stem, reason in (("eel", "is a link to"), ("fox", "is no text in UTF-8")):
        status, answer = window.save(stem, "of the page")
        assert status == 422 and reason in answer["what"]
    assert Path("elsewhere.txt").read_text() == "of elsewhere"
    assert (DATA / "fox.txt").read_bytes() == b"caf\xe9"


def test_captions_of_a_metadata_file_and_of_a_list_are_only_shown() -> None:
    Path("meta.json").write_text(json.dumps({"ant": {"caption": "in the file"}}))
    with served(facts_of(config(metadata_file="meta.json"))) as address:
        window = Window(address)
        assert window.captions["ant"]["written"] == "in the file"
        assert "meta.json; edit it there" in window.save("ant", "no")[1]["what"]
        assert window.save("bee", "yes")[0] == 200
    (DATA / "list.jsonl").write_text(json.dumps({"image_path": "eel.png", "caption": "listed"}))
    values = config()
    values["datasets"]["shapes"]["path"] = "data/shapes/list.jsonl"
    with served(facts_of(values)) as address:
        window = Window(address)
        assert window.captions["eel"]["written"] == "listed"
        assert "has its captions in" in window.save("eel", "no")[1]["what"]
    assert (DATA / "eel.txt").read_text() == "a white circle\n"


# -- find and replace, undo -----------------------------------------------------------------------


def test_a_replacement_is_what_its_preview_showed(window: Window) -> None:
    before = files()
    status, preview = window.replace("a ", "the ")
    assert (status, preview["count"]) == (200, 2)
    assert preview["rows"] == [
        ["shapes", "eel", "a white circle", "the white circle"],
        ["shapes", "fox", "a blue square", "the blue square"],
    ]
    assert files() == before
    assert window.replace("a ", "the ", preview="another")[0] == 409
    assert window.replace("a", "the ", preview=preview["preview"])[0] == 409
    status, answer = window.replace("a ", "the ", preview=preview["preview"])
    assert (status, answer["done"]) == (200, "saved: replacement in 2 captions")
    assert (DATA / "fox.txt").read_text() == "the blue square\n"
    assert window.undo()[1]["done"] == "undone: replacement in 2 captions"
    assert files() == before


def test_a_caption_that_changes_after_the_preview_stops_the_replacement(window: Window) -> None:
    preview = window.replace("a ", "the ")[1]["preview"]
    (DATA / "fox.txt").write_text("a fox of another program\n")
    assert window.replace("a ", "the ", preview=preview)[0] == 409
    assert (DATA / "eel.txt").read_text() == "a white circle\n"


@pytest.mark.parametrize(
    ("find", "options", "stems"),
    [
        ("circle", {}, ["eel"]),
        ("CIRCLE", {}, []),
        ("CIRCLE", {"case": False}, ["eel"]),
        ("circ", {"words": True}, []),
        ("circle", {"made": True}, ["ant", "eel"]),
        (".", {}, []),
        (r"\1", {}, []),
        ("a white circle", {}, []),  # it would be empty
    ],
)
def test_a_replacement_finds(
    window: Window, find: str, options: dict[str, bool], stems: list[str]
) -> None:
    put = r"\1" if find != "a white circle" else ""
    preview = window.replace(find, put, **options)[1]
    assert [row[1] for row in preview["rows"]] == stems
    assert preview["emptied"] == (find == "a white circle")
    if stems:
        before = files()
        window.replace(find, put, preview=preview["preview"], **options)
        assert all(r"\1" in (DATA / f"{stem}.txt").read_text() for stem in stems)
        window.undo()
        assert files() == before


def test_undo_takes_back_each_save_and_leaves_what_changed_since(window: Window) -> None:
    before = files()
    window.save("eel", "one")
    window.save("ant", "two")
    window.save("eel", "three")
    (DATA / "eel.txt").write_text("from elsewhere")
    _, answer = window.undo()
    assert answer["kept"] == ["eel: was changed by another window or program, so it stays"]
    assert window.undo()[1]["kept"] == []
    assert not (DATA / "ant.txt").exists()
    assert window.undo()[1]["kept"]
    assert window.last is None
    assert files() == before | {"eel.txt": b"from elsewhere"}
    assert (DATA / "eel.txt").read_text() == "from elsewhere"
    assert window.post("undo", number=1)[0] == 409


def test_undo_of_a_window_that_did_not_see_the_last_save_asks_first(address: str) -> None:
    one, two = Window(address), Window(address)
    one.save("eel", "one")
    two.learn(two.get(f"state?since={two.version}"))
    one.save("fox", "two")
    assert two.undo()[0] == 409
    assert (DATA / "fox.txt").read_text() == "two\n"


# -- tokens and the next build --------------------------------------------------------------------


def test_tokens_are_those_of_the_text_as_it_is_encoded() -> None:
    with served(facts_of(config(captions={"caption_prefix": "sks"}))) as address:
        window = Window(address)
        long = "x" * 80  # 80 tokens: the micro model's tokenizer knows letters only
        answer = window.post("tokens", dataset="shapes", stem="eel", text=long)[1]
        (((kept, _, rest), ((tokens, seen),)),) = answer["texts"]
        assert (tokens, seen, answer["encoders"]) == (83, 75, ["text_encoder"])
        assert kept + rest == f"sks {long}"
        answer = window.post("tokens", dataset="shapes", stem="eel", text=" ")[1]
        assert "empty" in answer["fault"]


def test_a_line_says_what_the_next_build_does(window: Window) -> None:
    everything = "The next build makes 2 captions, encodes up to 6 texts and encodes 12 latents."
    assert window.work() == everything
    window.save("cat", "a cat")
    assert window.work() == everything.replace("2 captions", "1 caption")


def test_captions_that_changed_since_the_last_training_are_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = {"ant": MADE["ant"], "bee": "made by another prompt", "eel": "a white circle"}
    roster = [RosterItem(dataset="shapes", stem=stem, texts=[own]) for stem, own in texts.items()]
    monkeypatch.setattr(caption_editor, "items_of", lambda _: roster)

    def changed() -> set[str]:
        return {stem for stem, own in window.captions.items() if own["changed"]}

    with served(facts_of(config())) as address:
        window = Window(address)
        assert changed() == {"bee"}
        window.save("eel", "an eel")
        assert changed() == {"bee", "eel"}
        window.undo()
        assert changed() == {"bee"}
