"""Measurements of pages and hand-overs between two workers."""
