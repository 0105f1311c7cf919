"""Words of the command `latentmake`, one module each."""
