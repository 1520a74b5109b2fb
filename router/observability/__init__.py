"""Observability of requests: outcomes by SLO class, goodput, recent traces, OpenTelemetry spans."""
