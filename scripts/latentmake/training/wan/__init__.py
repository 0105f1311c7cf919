"""The trainer `wan`: LoRAs of Wan's networks."""
