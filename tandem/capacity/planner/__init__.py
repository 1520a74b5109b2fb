"""The planner: decides the number of workers per role, with no I/O and no clock."""
