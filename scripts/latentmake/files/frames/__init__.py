"""Frames of videos by their index, decoded by processes that may hang or crash."""

from __future__ import annotations

from latentmake.files.frames.ended import EndedError, HungError
from latentmake.files.frames.workers import Workers, frames_at, probe_videos

__all__ = ["EndedError", "HungError", "Workers", "frames_at", "probe_videos"]
