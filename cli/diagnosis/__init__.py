"""`tandem doctor`: whether this host can serve, and what to change if not."""
