"""Tests `tandem why` on a real cluster, with loads that each have a known bottleneck."""
