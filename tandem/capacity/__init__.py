"""Capacity planning: the planner of worker roles, `tandem plan`, and simulated clusters under a virtual clock."""
