"""The bodies of the OpenAI-compatible routes as pydantic models."""
