"""A whole cluster under a virtual clock: the product's own policies over devices and networks that only pass time."""
