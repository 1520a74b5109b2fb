"""Training of Medusa heads on what the model itself answers."""
