"""Grafana dashboards as code: `python -m deploy.dashboards` writes the JSON files beside this one.

Expressions are made of `telemetry.families`, so that none asks for a metric or a label that is not there.
"""
