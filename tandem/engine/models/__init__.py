"""Model architectures and their parameters."""
