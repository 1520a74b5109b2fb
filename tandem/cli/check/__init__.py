"""`tandem check`: tests whether an OpenAI server answers correctly while clients leave, repeat and wait."""
