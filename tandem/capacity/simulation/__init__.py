"""Simulates whole clusters under a virtual clock: the product's own policies on modelled devices and networks."""
