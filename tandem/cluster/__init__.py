"""The cluster's control plane: one controller keeps the router and all workers alive and tracks which workers serve."""
