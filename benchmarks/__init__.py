"""Benchmarks of Tandem against its peers and against the hardware; each run prints one JSON object and can save it."""
