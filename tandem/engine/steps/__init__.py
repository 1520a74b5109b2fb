"""A step: its rows, its draws, and the buffer they are packed into."""
