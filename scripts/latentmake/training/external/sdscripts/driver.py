"""Driver of sd-scripts' own caching strategies: a program that runs in its environment.

    python driver.py JOB.json

It imports nothing of this package. A job names the calls of sd-scripts that load networks and
strategies, and the items with their files; a line in the file `results` tells the end of each. Each
item is encoded alone: no neighbour changes its bytes. What fails is tried once more at the end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

_SECONDS = 10.0  # between two lines about the progress
_FAILURES = 3  # in a row before anything succeeded: then it is hardly the items' fault


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _find(name: str) -> Any:
    """Return a function or class by its dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(_module(module), attribute)


def _device(torch: Any) -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _network(torch: Any, wanted: dict[str, Any], device: str) -> Any:
    """Load a network, in its dtype and on the device."""
    dtype = getattr(torch, wanted["dtype"])
    arguments = dict(wanted["arguments"])
    if wanted["takes_dtype"]:
        arguments["dtype"] = dtype
    loaded = _find(wanted["call"])(**arguments)
    network = loaded if wanted["place"] is None else loaded[wanted["place"]]
    network.to(device=device, dtype=dtype)
    network.requires_grad_(False)
    return network.eval()


class _Latents:
    """Encoder of pictures, which sd-scripts itself reads and resizes."""

    def __init__(self, torch: Any, job: dict[str, Any], networks: list[Any], device: str) -> None:
        self._library = _module("library.train_util")
        self._library.HIGH_VRAM = True  # else memory is cleaned after each picture
        self._strategy = _find(job["strategy"])(True, 1, False)
        self._network = networks[0]
        self._device = torch.device(device)
        self._options = job["flip_aug"], job["alpha_mask"]
        self._shape: Any = None

    def write(self, item: dict[str, Any], path: str) -> None:
        """Write the file of an item."""
        if item["bucket"] != self._shape:
            self._shape = item["bucket"]
            self._library.clean_memory_on_device(self._device)
        info = self._library.ImageInfo(item["key"], 1, "", False, item["image"])
        info.image_size, info.resized_size = tuple(item["size"]), tuple(item["resized"])
        info.bucket_reso, info.latents_npz = tuple(item["bucket"]), path
        self._strategy.cache_batch_latents(self._network, [info], *self._options, False)


class _Text:
    """Encoder of captions."""

    def __init__(self, torch: Any, job: dict[str, Any], networks: list[Any], device: str) -> None:
        self._library = _module("library.train_util")
        self._strategy = _find(job["strategy"])(True, 1, False, False)
        self._tokenizer = _find(job["tokenizer"]["call"])(**job["tokenizer"]["arguments"])
        self._encoding = _find(job["encoding"])()
        self._networks = networks
        self._context: Any = contextlib.nullcontext
        if job["autocast"] is not None:
            dtype = getattr(torch, job["autocast"])
            self._context = lambda: torch.autocast(device, dtype=dtype)

    def write(self, item: dict[str, Any], path: str) -> None:
        """Write the file of an item."""
        info = self._library.ImageInfo(item["key"], 1, item["caption"], False, "")
        info.text_encoder_outputs_npz = path
        with self._context():
            self._strategy.cache_batch_outputs(
                self._tokenizer, self._networks, self._encoding, [info]
            )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(place: str) -> None:
    """Carry out a job."""
    job = json.loads(Path(place).read_bytes())
    sys.path[:1] = [job["folder"], *(x for x in sys.path[:1] if Path(x) != Path(__file__).parent)]
    torch = _module("torch")
    device, kind, total = _device(torch), job["kind"], len(job["items"])
    _say(f"{kind}: loading the networks to {device}")
    networks = [_network(torch, each, device) for each in job["networks"]]
    encoder = (_Text if kind == "text" else _Latents)(torch, job, networks, device)
    said = time.monotonic()

    def fault_of(item: dict[str, Any]) -> Exception | None:
        """Write the file of an item; return what went wrong."""
        begun = Path(f"{item['file']}.begun.npz")
        begun.unlink(missing_ok=True)  # a strategy would add to what lies there
        torch.manual_seed(item["seed"])
        try:
            encoder.write(item, str(begun))
            begun.replace(item["file"])
        except Exception as error:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()  # it may have been memory
            return error
        return None

    with torch.no_grad(), Path(job["results"]).open("a", encoding="utf-8") as results:

        def tell(item: dict[str, Any], fault: Exception | None) -> None:
            error = {} if fault is None else {"error": f"{type(fault).__name__}: {fault}"}
            results.write(f"{json.dumps({'key': item['key'], **error})}\n")
            results.flush()

        failed, last = [], None
        for number, item in enumerate(job["items"], 1):
            fault = fault_of(item)
            if fault is None:
                tell(item, None)
                last = item
            else:
                failed.append(item)
                if number == len(failed) == _FAILURES and not job["known"]:
                    raise fault
            if time.monotonic() - said > _SECONDS:
                said = time.monotonic()
                _say(f"{kind}: {number} of {total}")
        # What went well goes well again, unless the device is at fault.
        if failed and last is not None:
            again = {**last, "file": f"{last['file']}.again"}
            fault = fault_of(again)
            if fault is not None:
                raise fault
            Path(again["file"]).unlink()
        for item in failed:
            tell(item, fault_of(item))


if __name__ == "__main__":
    main(sys.argv[1])
