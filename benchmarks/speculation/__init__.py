"""How many tokens a step gains from drafts: real answers that proposers are replayed over, and an oracle."""
