"""Commands that show a running cluster: `status`, `top`, `why`, `trace` and `logs`."""
