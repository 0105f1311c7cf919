"""Speed of past jobs: what a target costs besides encoding, and what its pixels or tokens cost.

Sums over past jobs, of which each halves the weight of those before. Encoding takes
a * targets + b * amount seconds, by least squares with a, b >= 0; files' bytes likewise.
"""

from __future__ import annotations

import json
from typing import NamedTuple

_CALL, _CALL_SHARE = 1e-3, 0.25  # guess at seconds of a call, while jobs do not tell
_VARIED = 1e-3  # relative determinant above which jobs tell targets and amounts apart


class Work(NamedTuple):
    """Result of one job, for later estimates.

    Attributes:
        targets: number that it encoded.
        seconds: from the first encoded item to its end.
        starting: seconds before; None where its process had encoded for another job.
        amount: pixels x frames of all images or clips, or tokens of captions; 0 where unknown.
        encoding: seconds in which the device encoded; None where unknown.
        size: bytes of the files.
        words: on its bottleneck; "" of a short job.
        handled: number of targets with those that it found or linked, which take time too.
    """

    targets: int
    seconds: float
    starting: float | None
    amount: float = 0.0
    encoding: float | None = None
    size: float = 0.0
    words: str = ""
    handled: int = 0


class Rate(NamedTuple):
    """Cost of targets, as far as past jobs tell.

    Attributes:
        starting: seconds from the start of a job to its first encoded item.
        target: seconds of each target.
        unit: further seconds of each pixel of a frame, or token of a caption.
        target_size: bytes of each target.
        unit_size: further bytes of each pixel or token.
        speed: targets in a second, of whatever size they were.
        words: on the bottleneck of the last job that was not short.
    """

    starting: float
    target: float
    unit: float = 0.0
    target_size: float = 0.0
    unit_size: float = 0.0
    speed: float = 0.0
    words: str = ""

    def seconds(self, targets: float, amount: float) -> float:
        """Return the time that some targets take in a job that has started."""
        return self.target * targets + self.unit * amount

    def size(self, targets: float, amount: float) -> float:
        """Return the bytes of some targets; 0 where nothing is known."""
        return self.target_size * targets + self.unit_size * amount


class _Sums(NamedTuple):
    """Weighted sums over jobs: of m targets handled and n encoded, amount p, e seconds, s bytes.

    Residuals of a job weigh 1 / p: times vary the more, the longer a job is.
    """

    starts: float = 0.0
    starting: float = 0.0
    m: float = 0.0
    n: float = 0.0
    other_seconds: float = 0.0
    p: float = 0.0
    nn_p: float = 0.0
    e: float = 0.0
    ne_p: float = 0.0
    s: float = 0.0
    ns_p: float = 0.0


def sums_with(past: str | None, work: Work) -> str:
    """Return, as text, the sums over past jobs and one more, and the words of the last one."""
    before, words = _read(past) if past else (_Sums(), "")
    if work.amount and not before.p:
        before = _Sums(before.starts, before.starting)  # nobody knew the amounts
    n, p, s = work.targets, work.amount, work.size
    e = min(work.seconds, work.seconds if work.encoding is None else work.encoding) if p else 0.0
    new = _Sums(
        starts=work.starting is not None,
        starting=work.starting or 0.0,
        m=max(n, work.handled),
        n=n,
        other_seconds=work.seconds - e,
        p=p,
        nn_p=n * n / p if p else 0.0,
        e=e,
        ne_p=n * e / p if p else 0.0,
        s=s,
        ns_p=n * s / p if p else 0.0,
    )
    # A job that does not tell a start-up takes no weight from those that did.
    kept = [0.5 if work.starting is not None else 1.0] * 2 + [0.5] * (len(new) - 2)
    weighted = zip(kept, before, new, strict=True)
    sums = [weight * old + add for weight, old, add in weighted]
    return json.dumps([sums, work.words or words])


def _read(text: str) -> tuple[_Sums, str]:
    sums, words = json.loads(text)
    return _Sums(*sums), words


def rate_of(sums: str) -> Rate:
    """Return the rate from the sums over past jobs."""
    all_, words = _read(sums)
    target, unit = _fitted(all_, all_.e, all_.ne_p)
    if not target and unit:  # a small network takes its time whatever the size
        target = min(_CALL, _CALL_SHARE * all_.e / all_.n)
        unit = (all_.e - target * all_.n) / all_.p
    return Rate(
        all_.starting / all_.starts if all_.starts else 0.0,
        target + all_.other_seconds / all_.m,
        unit,
        *_fitted(all_, all_.s, all_.ns_p),
        all_.m / (all_.e + all_.other_seconds),
        words,
    )


def old_rate(sums: str) -> Rate:
    """Return the rate from sums of targets alone, as a former version wrote them."""
    targets, seconds, starting, jobs = map(float, sums.split())
    return Rate(starting / jobs, seconds / targets, speed=targets / seconds)


def _fitted(sums: _Sums, y: float, ny_p: float) -> tuple[float, float]:
    """Return a, b >= 0 of y = a * n + b * p; a is 0 where jobs do not tell both."""
    if not sums.p:
        return y / sums.n, 0.0
    alone = y / sums.p
    determinant = sums.nn_p * sums.p - sums.n**2
    if determinant <= _VARIED * sums.nn_p * sums.p:
        return 0.0, alone
    a = (ny_p * sums.p - sums.n * y) / determinant
    b = (sums.nn_p * y - sums.n * ny_p) / determinant
    return (a, b) if a > 0 and b > 0 else (0.0, alone)
