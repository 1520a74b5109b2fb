"""Commands that show a running cluster: status, top, why, traces, logs."""
