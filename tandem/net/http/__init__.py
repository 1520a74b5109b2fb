"""The HTTP server that all processes use, with deadlines for headers, bodies and idle connections."""
