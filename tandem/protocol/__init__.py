"""The contract between components: messages, errors, and the edges of a request's life."""
