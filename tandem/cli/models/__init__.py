"""Models that commands provide: the default model, Hub downloads, and random weights in the shape of a known model."""
