"""The processes of the cluster: which there are, whether they live, and starting them again."""
