"""The cluster's metrics: their names, the registry that holds them, their exposition, and the diagnosis from them."""
