"""Commands that show a running cluster: status, top, traces, logs."""
