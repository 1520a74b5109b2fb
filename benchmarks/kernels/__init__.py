"""Single kernels on a GPU, against a copy, the matrix rate, libraries or their parts, and candidate tiles for them."""
