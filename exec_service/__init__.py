"""The gateway: endpoints, admission, dispatch. Importing it reads nothing and starts nothing."""
