"""Simulates whole clusters under a virtual clock: the real schedulers and policies on modelled devices and networks."""
