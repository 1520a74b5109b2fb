"""Measurements of Tandem against its peers and against the machine; each run prints, and can keep, one JSON object."""
