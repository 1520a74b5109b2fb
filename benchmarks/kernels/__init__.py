"""Single kernels on a GPU, compared with a copy, the matrix rate, libraries, or their parts, and candidate tiles."""
