"""Commands of `latentmake`, such as `latentmake status`."""
