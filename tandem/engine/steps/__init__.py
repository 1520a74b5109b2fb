"""One step of the engine: its rows, its sampling inputs, and the buffer they are packed into."""
