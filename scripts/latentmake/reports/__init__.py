"""Reports: what a plan, a build and a training look like to a person."""
