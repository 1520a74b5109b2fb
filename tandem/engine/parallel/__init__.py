"""The parts of a model that a group of ranks computes together (tensor parallelism)."""
