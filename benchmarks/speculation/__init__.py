"""How many tokens per step draft tokens gain: proposers on real answers, and an oracle that knows the answers."""
