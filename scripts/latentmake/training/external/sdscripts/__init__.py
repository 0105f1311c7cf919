"""sd-scripts: what it reads, how it cuts images, and how it is launched."""
