"""A port for a server that must be told which."""

import random
import socket

# Below the range that Linux takes the ports of outgoing connections from: nobody gets one before its server has started.
_PORTS = range(10_000, 32_768)
_choice = random.SystemRandom()


def free_port() -> int:
    while True:
        port = _choice.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
