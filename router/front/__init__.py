"""Front processes, which hold clients' connections for a router, and the router's side of them."""
