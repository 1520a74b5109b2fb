"""The description of all HTTP routes: `/openapi.json`, and `/docs` for browsers."""
