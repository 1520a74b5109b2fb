"""Timelines, traces and spans of requests."""
