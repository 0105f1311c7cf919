"""Import of the dataset files of musubi-tuner and sd-scripts."""
