"""`tandem doctor`: checks whether this host can serve, and says what to change if it cannot."""
