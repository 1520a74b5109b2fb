"""Products of low-rank adapters (LoRA), many adapters in one step."""
