"""Credentials, and mutual TLS between the components of a cluster."""
