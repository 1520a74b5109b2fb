"""Compares the predictions of two models, a candidate and a reference, by teacher forcing on the serving engine."""
