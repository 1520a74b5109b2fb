"""Processes that hold clients' connections for a router, and the router's end of them."""
