"""KV pages and hand-overs between two workers, against a plain copy of the same run."""
