"""The strategy table under a virtual clock: the product's policies over devices that only take time."""
