"""The router: text in, text out. Reading order: service, admission, placement, dispatch, stream."""
