"""Layouts: the file and tensor names that a trainer expects. Names alone; nothing imports torch."""
