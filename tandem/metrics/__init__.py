"""The cluster's metrics: definitions, the registry with their values, the export, and a diagnosis from them."""
