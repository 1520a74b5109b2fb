"""Supervision of the cluster's processes: their slots and roles, their health, and restarts."""
