"""All that is about musubi-tuner as a program: its commands, its checklist, what it is given."""
