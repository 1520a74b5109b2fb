"""Proposers of drafts: cheap guesses for the tokens that follow, which the model verifies several at a time."""
