"""The life of a call, from admission to its result."""
