"""A step of the engine: its rows, its sampling inputs, and the buffer into which they are packed."""
