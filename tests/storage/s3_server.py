"""A real S3 server in a process of its own, and what it was asked for, by its own log."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import boto3

_LISTENS = re.compile(r"http://127\.0\.0\.1:\d+(?=\s)")
_LINE = re.compile(r"(GET|HEAD|PUT|POST|DELETE) (/\S*) HTTP/1\.[01]\S*\" (\d+)")


class Asked(NamedTuple):
    """One request, as the server logged it."""

    method: str
    path: str
    status: int


@dataclass
class Server:
    """The process, its address and its log."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]
    _read: int = 0

    @classmethod
    def start(cls, folder: Path) -> Server:
        log = folder / "access.log"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)
        while not (said := _LISTENS.search(log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        return cls(said[0], log, process)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def environment(self) -> dict[str, str]:
        """What a user sets; nothing of this machine's own counts."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": "tester",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def asked(self) -> list[Asked]:
        """Return what was asked for since this was called last."""
        lines = self.log.read_text(errors="replace")
        new, self._read = lines[self._read :], len(lines)
        return [Asked(m[1], unquote(m[2]), int(m[3])) for m in _LINE.finditer(new)]


@dataclass
class Bucket:
    """A bucket of a test's own."""

    name: str
    server: Server

    @property
    def client(self) -> Any:
        return boto3.client("s3")  # by the environment, as the program's

    def create(self) -> Bucket:
        self.client.create_bucket(Bucket=self.name)
        return self

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data)

    def upload(self, folder: Path, prefix: str) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def get(self, key: str) -> bytes:
        return self.client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def requests(self) -> list[tuple[str, str]]:
        """Return method and key of listings and fetches since; the key of a listing is empty."""
        found = []
        for method, path, _ in self.server.asked():
            bucket, _, key = path.removeprefix("/").partition("?")[0].partition("/")
            if bucket == self.name and method != "HEAD":
                found.append((method, key))
        return found
