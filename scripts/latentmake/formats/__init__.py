"""Files: atomic writes, headers, checks, synced folders, paths, images and videos."""
