"""Bytes on a disk: atomic writes, headers of files, folders in sync, paths, media."""
