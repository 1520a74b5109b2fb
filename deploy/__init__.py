"""What operators take: Grafana's dashboards, Prometheus' rules."""
