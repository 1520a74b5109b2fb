"""Benchmarks of Tandem against its peers and the hardware. Each run prints one JSON object and can save it."""
