"""Compares the predictions of two models, a candidate and a reference: teacher-forced, on the engine that serves."""
