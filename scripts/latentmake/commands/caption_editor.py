"""Captions of a run as a person edits them on a page: saves, replacements and undo.

Captions are files beside pictures, which other programs may change at any time. Each change names
the digest of the file that it is based on. If the file is another one by now, nothing is written.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentmake import backends
from latentmake.base import atomic, digest
from latentmake.base.errors import LatentmakeError, SourceError
from latentmake.data import caption_files
from latentmake.data.contents import Contents, decode_text
from latentmake.data.item import IMAGE, Item, text_fault
from latentmake.data.texts import made_text, texts_with
from latentmake.pages.captions import read_texts, split, token_counter
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import result_folder
from latentmake.runs.history import items_of

_SHOWN = 200  # most changes that a preview shows
_GONE = "was changed by another window or program"
_MARK = b"\xef\xbb\xbf"  # byte order mark

_Values = dict[str, Any]
_Place = tuple[str, str]  # dataset and stem


class ConflictError(LatentmakeError):
    """A change is based on something that is no longer so; `values` tell how it is now."""

    def __init__(self, what: str, **values: Any) -> None:
        self.values = {"what": what, **values}
        super().__init__(what)


@dataclass
class Caption:
    """Caption of one item."""

    place: _Place
    item: Item  # without texts, with the files of its made captions
    path: Path  # its caption file, which may not exist
    fixed: str  # why the file cannot be written; "" if it can
    fault: str = ""
    made: str | None = None  # text of captioners
    data: bytes | None = None  # content of the file; None if it does not exist
    texts: list[str] = field(default_factory=list)  # texts as they are encoded
    seen: list[str] | None = None  # texts that the last training saw
    version: int = 0  # number of its last change

    @property
    def base(self) -> str:
        """Digest of the file; "" if it does not exist."""
        return "" if self.data is None else digest.of_bytes(self.data)

    @property
    def written(self) -> str | None:
        """Text of the file, without the end of its last line; None if there is no such text."""
        try:
            text = self.data if self.data is None else decode_text(self.data, str(self.path))
        except SourceError:
            return None
        return None if text is None else text.removesuffix("\n")

    def values(self) -> _Values:
        """Return the JSON values of the caption for the page."""
        image, text = self.item.file(IMAGE), self.written
        if self.fixed and self.data is None:  # its text is in a list
            text = next(iter(self.texts), None)
        is_written = self.data is not None or caption_files.is_written(self.item)
        makers = "" if is_written else ", ".join(self.item.captioners)
        awaits = bool(makers) and caption_files.awaits(self.item)
        return {
            **{"dataset": self.place[0], "stem": self.place[1], "path": str(self.path)},
            **{"written": text, "made": self.made, "by": makers, "awaits": awaits},
            **{"captioner": bool(self.item.made), "fixed": self.fixed},
            **{"fault": self.fault, "base": self.base},
            "changed": self.seen is not None and self.seen != self.texts and not awaits,
            "picture": image.stat.mtime_ns if image and not self.item.is_remote else None,
        }

    def bytes_of(self, text: str) -> bytes:
        """Return the content of the file with another text; its line ends and mark are kept."""
        before = b"\n" if self.data is None else self.data
        data = text.replace("\r\n", "\n").encode() + b"\n" * before.endswith(b"\n")
        data = data.replace(b"\n", b"\r\n") if b"\r\n" in before else data
        return _MARK * before.startswith(_MARK) + data


_Changes = Sequence[tuple[Caption, bytes | None]]


class Editor:
    """Captions of a run. All methods but `tokens` and `facts` are called in one thread.

    Attributes:
        version: number of the last change.
        work: line about the next build; "" while it is computed.

    Args:
        facts: facts about the configuration; the captions come from later ones.
        run: name of the run.
        changed: function that is called after each change.
    """

    def __init__(self, facts: Facts, run: str, changed: Callable[[], object]) -> None:
        self._config, self._run, self._changed = facts.config, run, changed
        self._model = facts.config.runs[run].model
        self._like_sdscripts = facts.layout(self._model).like_sdscripts
        self._captions: dict[_Place, Caption] = {}
        self.version, self.work = 0, ""
        # For each save its version, words, and places with the bytes before and after it.
        self._saves: list[tuple[int, str, list[tuple[_Place, bytes | None, bytes | None]]]] = []
        self._counter: Any = None

    def facts(self) -> Facts:
        """Return facts about the files as they are now."""
        encoders = self._config.publish.caches
        return backends.facts_of(self._config, encoders=encoders, read_only=True)

    # -- reading ------------------------------------------------------------------------------

    def load(self) -> _Values:
        """Read all captions again; return the JSON values of all of them."""
        facts, roster = self.facts(), items_of(result_folder(self._run)) or []
        seen = {(item.dataset, item.stem): item.texts for item in roster}
        with facts.memo:
            names = self._config.runs[self._run].datasets
            captions = [one for name in names for one in self._of_dataset(facts, name)]
        for caption in captions:
            caption.seen, caption.version = seen.get(caption.place), self.version
        self._captions = {caption.place: caption for caption in captions}
        self._changed()
        return {"trained": bool(seen), **self.state(-1)}

    def _of_dataset(self, facts: Facts, name: str) -> Iterator[Caption]:
        settings, (_, rows) = self._config.datasets[name], facts.listed(name)
        usable, faults = facts.items(name, self._model)
        items = {item.stem: item for item in usable}
        fault_of = {fault.stem: fault.what for fault in faults}
        listed, without = facts.items_with_made(name), caption_files.without_files(name, settings)
        contents = Contents((file for item in listed for file in item.files), facts.memo, settings)
        for item in listed:
            fixed = without or caption_files.fixed(settings, item, rows)
            path = caption_files.caption_path(settings, item)
            caption = Caption((name, item.stem), item, path, fixed, fault_of.get(item.stem, ""))
            try:
                caption.data = None if without else caption_files.read_if_there(path)
                if caption.data is not None and caption.written is None:
                    caption.fixed = f"{path} is no text in UTF-8; save it as UTF-8 first"
                elif item.stem in items:
                    caption.texts = read_texts(items[item.stem])
                if settings.captioner and not caption_files.awaits(item):
                    caption.made = made_text(contents, item, settings)
            except (SourceError, OSError) as error:
                caption.fault = caption.fault or str(error)
            yield caption

    def state(self, since: int) -> _Values:
        """Return JSON values: captions that changed since a version, and the work that is left."""
        captions = [one.values() for one in self._captions.values() if one.version > since]
        undo = self._saves[-1][:2] if self._saves else None
        return {"version": self.version, "work": self.work, "undo": undo, "captions": captions}

    def caption(self, dataset: str, stem: str) -> Caption:
        """Return the caption of an item; raises SourceError if there is no such item."""
        if (caption := self._captions.get((dataset, stem))) is None:
            raise SourceError("there is no such item", where=f"{dataset} {stem}"[:100])
        return caption

    def tokens(self, dataset: str, stem: str, text: str) -> _Values:
        """Return the texts that are encoded for a caption, with their tokens and the parts cut."""
        caption = self.caption(dataset, stem)
        self._counter = self._counter or token_counter(self._config.models[self._model])
        limits, see, notes = self._counter
        try:
            shown = [(own, see(own)) for own in self._texts(caption, text)]
        except SourceError as error:
            return {"fault": error.what, "texts": [], "encoders": []}
        rows = [[split(own, seen), [part[:2] for part in seen]] for own, seen in shown]
        return {"fault": " ".join(notes), "texts": rows, "encoders": [*limits]}

    # -- changes ------------------------------------------------------------------------------

    def save(self, dataset: str, stem: str, text: str, base: str) -> _Values:
        """Write the caption of an item; raises SourceError or ConflictError."""
        caption, settings = self._at(dataset, stem, base), self._config.datasets[dataset]
        if fault := text_fault(text):
            raise SourceError(fault)
        if not text.strip() and settings.empty_caption != "allow":
            hint = "use Back to the made caption" if settings.captioner else "describe the picture"
            raise SourceError("the caption is empty", hint=hint)
        return self._apply(f"caption of {stem}", [(caption, caption.bytes_of(text))])

    def back(self, dataset: str, stem: str, base: str) -> _Values:
        """Delete the caption file of an item, so that the made caption counts again."""
        caption = self._at(dataset, stem, base)
        if not self._config.datasets[dataset].captioner or caption.data is None:
            raise SourceError("there is no made caption to go back to")
        return self._apply(f"return of {stem} to the made caption", [(caption, None)])

    def replace(
        self, find: str, put: str, words: bool, case: bool, made: bool, preview: str
    ) -> _Values:
        """Replace a text in all captions, or preview the changes.

        Args:
            find: text to replace.
            put: text in its place.
            words: whether only complete words are replaced.
            case: whether upper and lower case must be the same.
            made: whether made captions are changed as well, each into a file of the person.
            preview: digest of the preview to apply; "" to preview only.
        """
        if not find:
            raise SourceError("there is no text to find")
        pattern = rf"(?<!\w){re.escape(find)}(?!\w)" if words else re.escape(find)
        regex = re.compile(pattern, 0 if case else re.IGNORECASE)
        changes, shown, emptied = list[tuple[Caption, bytes | None]](), [], 0
        for caption in self._captions.values():
            if caption.fixed:
                continue
            self._read(caption)
            text = caption.made if made and caption.data is None else caption.written
            new = regex.sub(lambda _: put, text or "")
            if new.strip() and new != text:
                changes.append((caption, caption.bytes_of(new)))
                shown.append([*caption.place, text, new])
            emptied += bool(text and not new.strip())
        name = digest.of_value([shown, [caption.base for caption, _ in changes]])
        if not preview:
            return {
                "preview": name,
                "count": len(shown),
                "emptied": emptied,
                "rows": shown[:_SHOWN],
            }
        if preview != name:
            raise ConflictError("captions were changed since the preview; look at it again")
        return self._apply(f"replacement in {len(changes)} captions", changes)

    def undo(self, number: int) -> _Values:
        """Take back the last save, if it has this number; files that changed since stay."""
        if not self._saves or self._saves[-1][0] != number:
            raise ConflictError("another window saved or undid something; look at it first")
        _, words, files = self._saves[-1]
        places = {
            place
            for place, _, after in files
            if place in self._captions and self._read(self._captions[place]).data == after
        }
        kept = [f"{place[1]}: {_GONE}, so it stays" for place, *_ in files if place not in places]
        since = self.version
        self._write([(self._captions[place], old) for place, old, _ in files if place in places])
        self._saves.pop()
        return {"kept": kept, "done": f"undone: {words}", **self.state(since)}

    def _at(self, dataset: str, stem: str, base: str) -> Caption:
        """Return an item's caption; raise ConflictError if `base` is not the digest of its file."""
        caption = self.caption(dataset, stem)
        if caption.fixed:
            raise SourceError(caption.fixed)
        if self._read(caption).base != base:
            raise ConflictError(_GONE, caption=caption.values())
        return caption

    def _read(self, caption: Caption) -> Caption:
        """Read the file of a caption again."""
        data = caption_files.read_if_there(caption.path)
        return caption if data == caption.data else self._learn(caption, data)

    def _learn(self, caption: Caption, data: bytes | None) -> Caption:
        """Note the present content of a caption's file."""
        self.version += 1
        caption.data, caption.version, caption.texts, caption.fault = data, self.version, [], ""
        text = caption.made if data is None else caption.written
        try:
            caption.texts = [] if text is None else self._texts(caption, text)
        except SourceError as error:
            caption.fault = error.what
        return caption

    def _texts(self, caption: Caption, text: str) -> list[str]:
        settings = self._config.datasets[caption.place[0]]
        return texts_with(settings, caption.item, text, like_sdscripts=self._like_sdscripts)

    def _apply(self, words: str, changes: _Changes) -> _Values:
        """Write files, and note how to take it back."""
        changes = [(caption, data) for caption, data in changes if caption.data != data]
        files, since = [(one.place, one.data, data) for one, data in changes], self.version
        try:
            self._write(changes)
        finally:  # on a full disk, a part of the files may be written
            done = [file for file in files if self._captions[file[0]].data == file[2]]
            if done:
                self._saves.append((self.version, words, done))
        return {"done": f"saved: {words}" if done else "nothing changed", **self.state(since)}

    def _write(self, changes: _Changes) -> None:
        """Write or delete files; raises ConflictError, StorageError or OSError."""
        try:
            for caption, data in changes:
                if data is None:
                    caption.path.unlink()
                elif caption.data is None:
                    atomic.create(caption.path, data)
                else:
                    with atomic.replacing(caption.path) as temporary:
                        temporary.write_bytes(data)
                        shutil.copymode(caption.path, temporary)
                self._learn(caption, data)
        except (FileExistsError, FileNotFoundError):
            raise ConflictError(_GONE, caption=self._read(caption).values()) from None
        finally:
            self._changed()
