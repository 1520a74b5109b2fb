"""`tandem up`: its options, what it checks first, and what it shows while the cluster starts."""
