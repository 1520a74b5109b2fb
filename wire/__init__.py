"""The contract between rooms: messages, errors and the edges of a request's life."""
