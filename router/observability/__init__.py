"""How requests went: verdicts by service class, goodput, recent traces, OpenTelemetry spans."""
