"""The checks of each listener before its handlers: key, role and quota."""
