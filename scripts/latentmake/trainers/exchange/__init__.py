"""Exchange with other programs: adoption, export, clips and dataset files."""
