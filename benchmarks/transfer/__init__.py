"""Measurements of KV pages and hand-overs between two workers."""
