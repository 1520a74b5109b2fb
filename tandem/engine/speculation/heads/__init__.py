"""Medusa heads: each guesses a token further ahead from the hidden state that drew the newest one."""
