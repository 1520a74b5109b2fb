"""Lifecycle events, traces and spans of requests."""
