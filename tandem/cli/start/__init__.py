"""`tandem up`: its options, its checks before the start, and its output while the cluster starts."""
