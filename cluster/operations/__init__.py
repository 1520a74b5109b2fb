"""What operators change in a running cluster: modes, numbers of workers, draining."""
