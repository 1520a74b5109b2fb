"""Ray: a private node or a joined cluster, and the actors that are the router's and the workers' processes."""
