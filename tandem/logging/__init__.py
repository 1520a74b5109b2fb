"""Log lines, log files that rotate, and errors that recur."""
