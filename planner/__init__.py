"""How many workers should do what: a pure policy over what was observed, without I/O and without a clock."""
