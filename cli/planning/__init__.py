"""`tandem plan`: how many workers a workload needs."""
