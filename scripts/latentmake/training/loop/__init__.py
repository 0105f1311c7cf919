"""The training loop that our own trainers share; a recipe knows network, objective and files."""
