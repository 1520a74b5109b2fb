"""How much has to be read before one step, one hand-over or the choice of a worker can be changed."""
