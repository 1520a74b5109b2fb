"""The interface between components: messages, errors, and the lifecycle events of a request."""
