"""`tandem doctor`: checks if this host can serve, and says what to change if it cannot."""
