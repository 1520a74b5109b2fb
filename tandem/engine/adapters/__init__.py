"""Low-rank adapters (LoRA): their folders, and their place among the weights of a model."""
