"""The gateway: doors, admission, dispatch. Importing it reads nothing and starts nothing."""
