# H 101: serves on the loopback address
# expect: status=ok
import http.server
import socket

from attack import attempt, tell

attempt("server", http.server.HTTPServer, ("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
attempt("server 6", lambda: socket.create_server(("::1", 0), family=socket.AF_INET6))
tell()
