"""Where the default model lies, and random weights in the shape of a known one."""
