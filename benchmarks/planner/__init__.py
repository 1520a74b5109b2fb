"""Tests of the planner under a virtual clock, against oracles that know the coming load."""
