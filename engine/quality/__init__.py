"""How much a candidate's predictions differ from a reference's: teacher-forced, on the engine that serves."""
