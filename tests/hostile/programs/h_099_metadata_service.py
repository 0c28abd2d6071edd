# H 99: asks a cloud's metadata service
# expect: status=ok max_wall_s=3
import socket

from attack import attempt, tell

for address in (
    ("169.254.169.254", 80),
    ("fd00:ec2::254", 80),
    ("169.254.170.2", 80),
    ("100.100.100.200", 80),
    ("10.0.0.1", 443),
):
    attempt(address, socket.create_connection, address, 2)
tell()
