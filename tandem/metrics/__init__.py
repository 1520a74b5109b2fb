"""The cluster's metrics: their names, the cells that hold them, their exposition, and the diagnosis made from them."""
