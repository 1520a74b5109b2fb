"""The planner: a pure policy for the number of workers per role, without I/O and without a clock."""
