"""TLS, keys, HTTP server, limits and RPC: everything that listens or connects."""
