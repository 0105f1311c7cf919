"""Repair of a cache: files that are wrong are deleted, so that the next build makes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from latentmake.errors import storage_error
from latentmake.index.memo import TargetStat, target_stat
from latentmake.plan import store
from latentmake.reports.verify_findings import WEIGHTS, Finding

__all__ = ["repaired"]


def repaired(finding: Finding, stats: Mapping[str, TargetStat]) -> Finding:
    """Delete the file of a finding, or put it into the store where it is sound but elsewhere's.

    Nothing is done to a foreign file, to trained weights, to a file that cannot be read, and to one
    that was replaced since it was read. Of a link the link is deleted.

    Args:
        finding: of a file.
        stats: path -> stat as it was read.
    """
    if finding.note or finding.kind in ("foreign", "unreadable", WEIGHTS):
        return finding
    path = Path(finding.path)
    try:
        if target_stat(path.lstat()) != stats.get(finding.path):
            return finding._replace(done="left, since it was replaced meanwhile")
        if finding.key and not path.is_symlink():
            store.put_away(path, finding.key)
            return finding._replace(done="kept in the store")
        path.unlink()
    except FileNotFoundError:
        return finding._replace(done="deleted meanwhile")
    except OSError as error:
        known = storage_error(error, finding.path)
        what = known.what if known else error.strerror
        return finding._replace(done=f"cannot be deleted ({what})")
    return finding._replace(done="deleted")
