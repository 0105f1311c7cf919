"""Runs: rows of their manifests, orders, records, findings, and the interface of trainers."""
