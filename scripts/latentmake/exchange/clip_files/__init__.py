"""Clips of videos as files: uncompressed .npz arrays and a train.jsonl, for other trainers."""
