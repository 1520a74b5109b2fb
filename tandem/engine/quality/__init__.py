"""Compares a candidate's predictions with a reference's: teacher-forced, on the engine that serves."""
