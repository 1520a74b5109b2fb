"""Network access of all processes: TLS, API keys, HTTP server, limits, gRPC."""
