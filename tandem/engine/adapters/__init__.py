"""LoRA adapters: reads their folders, and applies them to the model's matrix products."""
