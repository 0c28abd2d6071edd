# H 100: resolves names
# expect: status=ok max_wall_s=3
import socket

from attack import attempt, tell

for name in "example.com", "localhost", "redis", "kubernetes.default.svc":
    attempt(name, socket.getaddrinfo, name, 80)
    attempt(name, socket.gethostbyname, name)
tell()
