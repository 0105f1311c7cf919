"""Trainers: what a run's manifest is handed to."""
