"""`python -m exec_service` and the command `exec-service`."""

from exec_service.cli.main import main

if __name__ == "__main__":
    main()
