"""Index: facts about files, remembered by stat."""
