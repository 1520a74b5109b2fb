"""Tiers of the prefix cache: host memory and disk, which keep pages that the page pool may evict."""
