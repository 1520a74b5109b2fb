"""The engine alone: its steps, prompts and start, against ceilings, a peer or itself in another form."""
