"""Driver that runs the encoders of another program, in that program's environment.

    python driver.py JOB.json

It does not import this package, which that environment lacks. It runs a caching script of
musubi-tuner, or calls sd-scripts' caching strategies. Each line that it writes to the file
`results` names files that it begins, has written, or cannot write. It loads the networks once,
however many items fail.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

_FAILURES = 50  # after so many failures and no success, the items can hardly be at fault
_Write = Callable[[dict[str, Any], str], None]  # writes an item's cache file to a path


class _Attempts:
    """Encoder of batches that writes the result of each file to `results`."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._results = Path(job["results"]).open("a", encoding="utf-8")  # noqa: SIM115 -- till the end
        self._failed_before: bool = job["known"]  # an earlier build skipped all of these items
        self._failures = 0
        self._last: Callable[[], object] | None = None

    def report(self, **result: Any) -> None:
        """Write a line about some files."""
        self._results.write(f"{json.dumps(result)}\n")
        self._results.flush()  # the job reads the lines while the driver goes on

    def encode(
        self,
        batch: Sequence[Any],
        encode: Callable[[Sequence[Any]], object],
        files_of: Callable[[Any], list[str]],
        fault_of: Callable[[Any], str | None] = lambda _: None,
    ) -> None:
        """Encode a batch; if that fails, encode its items one by one.

        Args:
            batch: items to encode.
            encode: function that writes the files of a batch.
            files_of: function that returns the files of an item.
            fault_of: function that returns the fault of an item that was encoded, or None.

        Raises:
            Exception: the last item's error, if the items can hardly be at fault.
        """
        self.report(begun=[file for item in batch for file in files_of(item)])
        try:
            encode(batch)
        except Exception as error:
            self._free_memory()
            if len(batch) > 1:
                for item in batch:
                    self.encode([item], encode, files_of, fault_of)
            else:
                self.fail(files_of(batch[0]), error)
            return
        self._last = lambda: encode(batch)
        for item in batch:
            fault = fault_of(item)
            self.report(files=files_of(item), **({"error": fault} if fault else {}))

    def fail(self, files: list[str], error: Exception) -> None:
        """Report files that could not be written.

        Raises:
            Exception: the error itself, after `_FAILURES` failures without any success.
        """
        self.report(files=files, error=f"{type(error).__name__}: {error}")
        self._failures += 1
        if self._failures == _FAILURES and self._last is None and not self._failed_before:
            raise error

    def end(self) -> None:
        """After failures, encode the last good batch again, which raises if the device is lost."""
        if self._failures and self._last is not None:
            self._last()
        self._failures, self._last = 0, None

    def _free_memory(self) -> None:
        gc.collect()
        torch = importlib.import_module("torch") if "torch" in sys.modules else None
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # raises if the device is lost


# -- musubi-tuner ----------------------------------------------------------------------------------

_LOOP = re.compile(r"encode_datasets(_\w+)?|process_text_encoder_batches")
_NAN = re.compile(r"tensor has NaN: (.+), replace NaN with 0", re.DOTALL)
_NAN_FAULT = "had NaN, which it replaced by zeros: use another dtype, or look at the weights"


def _run_script(job: dict[str, Any], attempts: _Attempts) -> None:
    """Run a caching script; its loops over items skip a bad item and go on.

    A script without such loops runs unchanged.
    """
    script = job["script"]
    spec = importlib.util.spec_from_file_location(Path(script).stem, script)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.argv = [script, *job["arguments"]]
    spec.loader.exec_module(module)
    # A script may import these loops by name, so they are replaced in every module that has them.
    for imported in [*sys.modules.values()]:
        for name, value in [*getattr(imported, "__dict__", {}).items()]:
            is_own = getattr(value, "__module__", "") == __name__
            if inspect.isfunction(value) and _LOOP.fullmatch(name) and not is_own:
                setattr(imported, name, _guarded(value, attempts, job))
    if hasattr(module, "main"):
        module.main()


def _guarded(
    loop: Callable[..., object], attempts: _Attempts, job: dict[str, Any]
) -> Callable[..., object]:
    """Return a loop over datasets that skips items that cannot be read or encoded."""
    nan: set[str] = set()
    handler = logging.Handler()
    handler.emit = lambda record: nan.update(_NAN.findall(record.getMessage()))  # type: ignore[method-assign]

    def files_of(item: Any) -> list[str]:
        texts = job["kind"] == "text"
        file = str(item.text_encoder_output_cache_path if texts else item.latent_cache_path)
        body = os.path.splitext(item.item_key)[0]  # noqa: PTH122 -- as musubi-tuner does
        if item.frame_count is not None and not texts:
            body = body.rpartition("_")[0]  # a clip is named by its video and its frames
        files: list[str] = job["files"][os.path.dirname(file)][body]  # noqa: PTH120
        return [file] if file in files else files

    def run(*args: Any, **options: Any) -> None:
        bound = inspect.signature(loop).bind(*args, **options)
        encode = bound.arguments["encode"]
        logging.getLogger().addHandler(handler)  # the script has set its logging up by now

        def guarded(batch: Sequence[Any]) -> None:
            nan.clear()
            attempts.encode(
                batch, encode, files_of, lambda item: _NAN_FAULT if item.item_key in nan else None
            )

        bound.arguments["encode"] = guarded
        for dataset in bound.arguments["datasets"]:
            if not isinstance(dataset.datasource, _Source):  # an earlier pass replaced it already
                dataset.datasource = _Source(dataset.datasource, attempts, job["workers"])
        loop(*bound.args, **bound.kwargs)
        attempts.end()  # here, because the script deletes its networks next

    return run


class _Source:
    """Source of a dataset that reports and skips items that cannot be read."""

    def __init__(self, source: Any, attempts: _Attempts, workers: int) -> None:
        self._source = source
        self._attempts = attempts
        self._workers = workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __iter__(self) -> Iterator[Callable[[], Any]]:
        """Yield functions that return an item's data; threads read ahead."""
        waiting: deque[tuple[dict[str, Any], Future[Any]]] = deque()
        with ThreadPoolExecutor(self._workers) as pool:
            for line, fetch in zip(self._source.data, self._source, strict=True):
                waiting.append((line, pool.submit(_fetched, fetch)))
                if len(waiting) > self._workers:
                    yield from self._read(*waiting.popleft())
            while waiting:
                yield from self._read(*waiting.popleft())

    def _read(self, line: dict[str, Any], future: Future[Any]) -> Iterator[Callable[[], Any]]:
        try:
            fields = future.result()
        except Exception as error:
            self._attempts.fail(line["files"], error)
        else:
            yield lambda: fields


def _fetched(fetch: Callable[[], Any]) -> Any:
    """Read an item and decode its pictures here, in a thread, because Pillow only opens them."""
    fields = fetch()
    for pictures in fields:
        for picture in pictures if isinstance(pictures, list) else ():
            if hasattr(picture, "load"):
                picture.load()
    return fields


# -- sd-scripts ------------------------------------------------------------------------------------


def _find(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _device(torch: Any) -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _network(torch: Any, wanted: dict[str, Any], device: str) -> Any:
    dtype = getattr(torch, wanted["dtype"])
    arguments = dict(wanted["arguments"])
    if wanted["takes_dtype"]:
        arguments["dtype"] = dtype
    loaded = _find(wanted["call"])(**arguments)
    network = loaded if wanted["place"] is None else loaded[wanted["place"]]
    network.to(device=device, dtype=dtype)
    network.requires_grad_(False)
    return network.eval()


def _latents(torch: Any, job: dict[str, Any], networks: list[Any], device: str) -> _Write:
    """Return the encoder of pictures; sd-scripts itself reads and resizes them."""
    library: Any = importlib.import_module("library.train_util")
    library.HIGH_VRAM = True  # otherwise sd-scripts cleans memory after each picture
    strategy = _find(job["strategy"])(True, 1, False)
    shape: Any = None

    def write(item: dict[str, Any], path: str) -> None:
        nonlocal shape
        if item["bucket"] != shape:
            shape = item["bucket"]
            library.clean_memory_on_device(torch.device(device))
        info = library.ImageInfo(item["file"], 1, "", False, item["image"])
        info.image_size, info.resized_size = tuple(item["size"]), tuple(item["resized"])
        info.bucket_reso, info.latents_npz = tuple(item["bucket"]), path
        strategy.cache_batch_latents(networks[0], [info], job["flip_aug"], job["alpha_mask"], False)

    return write


def _text(torch: Any, job: dict[str, Any], networks: list[Any], device: str) -> _Write:
    library = importlib.import_module("library.train_util")
    strategy = _find(job["strategy"])(True, 1, False, False)
    tokenizer = _find(job["tokenizer"]["call"])(**job["tokenizer"]["arguments"])
    encoding = _find(job["encoding"])()
    dtype = getattr(torch, job["autocast"]) if job["autocast"] else None

    def write(item: dict[str, Any], path: str) -> None:
        info = library.ImageInfo(item["file"], 1, item["caption"], False, "")
        info.text_encoder_outputs_npz = path
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            strategy.cache_batch_outputs(tokenizer, networks, encoding, [info])

    return write


def _call_strategies(job: dict[str, Any], attempts: _Attempts) -> None:
    """Encode items one by one, so that the bytes do not depend on other items of a batch."""
    torch = importlib.import_module("torch")
    device, kind = _device(torch), job["kind"]
    sys.stderr.write(f"{kind}: loading the networks to {device}\n")
    networks = [_network(torch, network, device) for network in job["networks"]]
    encoded = (_text if kind == "text" else _latents)(torch, job, networks, device)

    def write(batch: Sequence[dict[str, Any]]) -> None:
        (item,) = batch
        begun = Path(f"{item['file']}.begun.npz")
        begun.unlink(missing_ok=True)  # a strategy would add its arrays to an existing file
        torch.manual_seed(item["seed"])
        encoded(item, str(begun))
        begun.replace(item["file"])  # a file under this name is complete

    with torch.no_grad():
        for item in job["items"]:
            attempts.encode([item], write, lambda item: [item["file"]])
        attempts.end()


def main(place: str) -> None:
    """Carry out the job in a JSON file."""
    job = json.loads(Path(place).read_bytes())
    here = Path(__file__).parent  # its modules could hide modules of the program
    sys.path[:1] = [job["folder"], *(path for path in sys.path[:1] if Path(path) != here)]
    (_run_script if "script" in job else _call_strategies)(job, _Attempts(job))


if __name__ == "__main__":
    main(sys.argv[1])
