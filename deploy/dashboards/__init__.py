"""Grafana dashboards as code: `python -m deploy.dashboards` writes the JSON files in this folder.

Expressions are built from `tandem.metrics.families`, so that every metric and label in them exists.
"""
