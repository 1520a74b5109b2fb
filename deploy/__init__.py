"""Files for operators: Grafana dashboards and Prometheus rules."""
