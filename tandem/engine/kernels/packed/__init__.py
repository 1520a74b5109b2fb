"""Products with packed weights: codes are unpacked in registers, or for long prompts into scratch memory."""
