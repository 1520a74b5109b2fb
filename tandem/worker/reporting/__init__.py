"""The load reports, metrics and liveness checks of a worker."""
