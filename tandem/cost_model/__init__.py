"""Models of the cost of steps and transfers, which workers fit and with which routers predict."""
