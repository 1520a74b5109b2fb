"""What the replies of all HTTP APIs have in common."""
