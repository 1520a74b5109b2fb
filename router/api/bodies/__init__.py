"""Request bodies as pydantic models, and their errors."""
