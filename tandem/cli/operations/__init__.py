"""Commands that change a running cluster: mode, size, drain, stop."""
