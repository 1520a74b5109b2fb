"""Medusa heads: head h predicts the token h + 1 positions after the newest, from the newest token's hidden state."""
