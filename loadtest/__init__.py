"""Load and speed measurements of the service. Not part of what is installed for users; runs from a checkout."""
