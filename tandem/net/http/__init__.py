"""The HTTP server of all processes, with deadlines for headers, bodies and idle connections."""
