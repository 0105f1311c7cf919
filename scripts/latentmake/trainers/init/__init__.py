"""The first configuration of a project, written for folders of pictures and a model."""
