"""A project whose captions a captioner makes, built in this process with encoders of a line each.

The captioner writes the mean colour of a picture behind its prompt. So equal pictures have equal
captions, and a test knows each caption.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from latentmake.config.root import parse
from latentmake.data.memo import MEMO, Memo
from latentmake.encode.reading import Loaded, Sample
from latentmake.layouts.names import plain_latents_metadata
from latentmake.plan import store
from latentmake.plan.facts import Facts
from latentmake.plan.manifest import Lock, ManifestOrder, read_lock, run_folder
from latentmake.plan.orders import Order
from latentmake.plan.planner import make_plan
from latentmake.plan.remembered import facts_with
from latentmake.plan.run_plan import RunPlan
from latentmake.runs.rows import Row, rows_of, write_manifest
from order_world import Encoded, carry_out
from PIL import Image

EMPTY = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors
VALUES: dict[str, Any] = {
    "datasets": {"cats": {"path": "data", "captioner": "flo"}},
    "captioners": {"flo": {"model": "models/flo", "prompt": "a"}},
    "models": {"tiny": {"vae": "models/vae", "text": "models/text_encoder"}},
    "runs": {"cats": {"datasets": "cats", "model": "tiny", "resolutions": 64}},
}


class CaptionedWorld:
    """A project in the working directory; `values` is its configuration.

    Attributes:
        made: targets that the last build made: `flo a` for a caption, `tiny a` for latents, and
            `text a 10` for the embedding of a text.
    """

    def __init__(self, *stems: str) -> None:
        self.values: dict[str, Any] = json.loads(json.dumps(VALUES))
        self.made: list[str] = []
        for part, config in (
            ("vae", {"block_out_channels": [1, 1, 1, 1]}),
            ("text_encoder", {"model_type": "clip_text_model"}),
            ("tokenizer", None),
            ("flo", {"model_type": "blip"}),
        ):
            place = Path("models", part)
            place.mkdir(parents=True)
            name = "config.json" if config else "tokenizer.json"
            (place / name).write_text(json.dumps(config))
            (place / "model.safetensors").write_bytes(EMPTY)
        self.weights("flo", 1)
        for number, stem in enumerate(stems):
            self.image(stem, 10 * number)

    def weights(self, captioner: str, number: int) -> None:
        """Give a captioner its files, with weights that differ by a number."""
        place = Path("models", captioner)
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps({"model_type": "blip"}))
        for name in ("preprocessor_config.json", "tokenizer_config.json"):
            (place / name).write_text("{}")
        (place / "tokenizer.json").write_text("{}")
        head = json.dumps({"__metadata__": {"n": str(number)}}).encode()
        (place / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)

    def image(self, stem: str, colour: int) -> None:
        """Write an image of a colour, 0 to 255."""
        path = Path("data", f"{stem}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (colour % 256, colour // 256 % 256, colour // 65536)).save(path)

    def write(self, stem: str, caption: str) -> None:
        """Write a caption beside an image, as a person does."""
        Path("data", f"{stem}.txt").write_text(caption)

    def facts(self) -> Facts:
        """Return new facts, with the memo of the project."""
        return facts_with(parse(self.values), Memo(MEMO))

    def plan(self, facts: Facts | None = None) -> RunPlan:
        """Plan the run, and write its orders."""
        facts = facts or self.facts()
        plan = make_plan(facts, ["cats"]).runs["cats"]
        facts.memo.save()
        return plan

    def build(self, *, most: int | None = None) -> Lock:
        """Build the caches and the manifest; with `most`, stop after so many orders."""
        plan, self.made = self.plan(), []
        store.keep(plan.orders)  # as a build does before its first job
        for order in plan.orders[:most]:
            encode = partial(self._encoded, order)
            carry_out(order, say=lambda _: None, encoder=Loaded(encode, 1))
        if plan.manifest_order and most is None:
            receipts = [order.receipt for order in plan.orders]
            run_folder("cats").mkdir(parents=True, exist_ok=True)
            manifest = ManifestOrder.read(plan.manifest_order)
            write_manifest(manifest, receipts, run_folder("cats"), lambda _: None)
        return read_lock("cats")

    def rows(self) -> dict[str, Row]:
        """Return stem -> row of the manifest."""
        return {row.stem: row for row in rows_of(run_folder("cats") / "manifest.jsonl")}

    def _encoded(self, order: Order, samples: list[Sample]) -> Encoded:
        for sample in samples:
            name = sample.content if isinstance(sample.content, str) else sample.item.stem
            self.made.append(f"{order.kind if order.kind == 'text' else order.model} {name}")
        if order.kind == "captions":
            prompt = order.dataset_settings.captioners[order.model].prompt
            return [({}, {"caption": self.answer(prompt or "", sample)}) for sample in samples]
        if order.kind == "text":
            return [({"text_encoder.hidden_state": torch.ones(2, 2)}, {}) for _ in samples]
        return [
            (
                {"latents": torch.ones(4, 8, 8)},
                plain_latents_metadata(1.0, 0.0, sample.original, (8, 8)),
            )
            for sample in samples
        ]

    def answer(self, prompt: str, sample: Sample) -> str:
        """Return the captioner's answer for a picture; tests replace it by faulty ones."""
        return f"{prompt} {int(np.asarray(sample.content)[..., 0].mean())}"
