"""Models that commands choose by themselves: the default model, and random weights in the shape of a known one."""
