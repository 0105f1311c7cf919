"""Frames of videos by their index, decoded by processes that may hang or crash."""

from __future__ import annotations

from latentmake.files.frames.ended import EndedError
from latentmake.files.frames.workers import Workers, frames_at, probe_videos

__all__ = ["EndedError", "Workers", "frames_at", "probe_videos"]
