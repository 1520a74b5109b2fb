"""The strategy table under a virtual clock: the product's policies on modelled devices."""
