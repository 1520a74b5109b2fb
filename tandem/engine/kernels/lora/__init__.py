"""Products of low-rank adapters (LoRA), for many adapters in one step."""
