"""Trainer `wan`: train LoRAs of Wan's networks from caches."""
