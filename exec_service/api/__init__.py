"""The HTTP endpoints and what they share."""
