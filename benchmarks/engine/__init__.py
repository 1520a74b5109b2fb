"""The engine alone: its steps, prompts and start, compared with ceilings, with a peer, or with other settings."""
