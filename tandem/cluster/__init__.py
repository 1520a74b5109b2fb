"""The cluster: one controller that keeps every worker and the router alive, and tracks which workers serve."""
