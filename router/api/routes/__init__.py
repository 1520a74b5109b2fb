"""Routes of the HTTP listener, by API."""
