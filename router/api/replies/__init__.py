"""The interface and the parts that the replies of all HTTP APIs share."""
