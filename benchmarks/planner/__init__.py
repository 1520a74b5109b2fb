"""The planner under a virtual clock, against oracles that know what is coming."""
