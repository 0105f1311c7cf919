"""Training loop of the trainers `sd` and `wan`; their recipes have network and objective."""
