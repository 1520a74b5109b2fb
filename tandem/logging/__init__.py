"""Log formats, log files with rotation, and rate limiting of recurring errors."""
