"""Commands that change a running cluster: mode, size, draining, its end."""
