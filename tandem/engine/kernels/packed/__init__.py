"""Products with packed weights, whose codes are unpacked in registers, or for long prompts into scratch memory."""
