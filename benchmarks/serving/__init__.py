"""What serving costs beside the engine: a whole cluster, and the host's work of a step."""
