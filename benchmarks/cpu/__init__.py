"""Measurements on the CPU, and the peers to compare with."""
