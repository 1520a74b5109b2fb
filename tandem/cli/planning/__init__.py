"""`tandem plan`: the number of workers that a workload needs."""
