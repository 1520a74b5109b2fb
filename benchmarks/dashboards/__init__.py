"""Pictures of the dashboards, drawn from a real Prometheus."""
