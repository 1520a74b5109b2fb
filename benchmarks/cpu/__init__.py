"""Measurements on the CPU, and peers to compare with."""
