"""How many workers, gateways and Redis servers a load needs."""
