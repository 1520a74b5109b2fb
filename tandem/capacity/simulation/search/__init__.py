"""The search for the highest rate within a service class."""
