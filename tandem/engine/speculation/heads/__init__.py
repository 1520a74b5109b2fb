"""Medusa heads: head h guesses the token h + 1 positions ahead, from the hidden state of the newest token's step."""
