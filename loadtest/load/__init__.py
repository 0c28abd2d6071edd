"""Load: users by locust, and bursts of calls in flight at once."""
