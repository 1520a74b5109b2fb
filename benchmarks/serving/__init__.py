"""The cost of serving beyond the engine: a whole cluster, and the host's work per step."""
