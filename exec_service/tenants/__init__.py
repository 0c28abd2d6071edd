"""API keys, and what each tenant may use."""
