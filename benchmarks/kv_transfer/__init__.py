"""KV transfers and hand-overs between two workers, compared with a plain copy of the same run."""
