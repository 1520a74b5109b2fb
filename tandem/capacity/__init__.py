"""Sizing of a cluster for a load: the planner, and the simulation of a cluster under a virtual clock."""
