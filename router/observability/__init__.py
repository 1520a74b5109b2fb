"""Observability of requests: verdicts by SLO class, goodput, recent traces, OpenTelemetry spans."""
