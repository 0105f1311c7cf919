"""The configuration: typed, closed against typing errors, each error in one line."""
