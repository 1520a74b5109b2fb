"""Low-rank adapters (LoRA): reading their folders, and adding them to a model's products."""
