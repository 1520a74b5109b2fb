"""How many workers a load needs: the planner, and the simulation of a cluster under a virtual clock."""
