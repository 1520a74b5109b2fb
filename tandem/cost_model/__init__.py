"""Cost models of steps and transfers: workers fit them to measurements, and routers predict with them."""
