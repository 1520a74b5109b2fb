"""API keys, derived secrets, and mutual TLS between the components of a cluster."""
