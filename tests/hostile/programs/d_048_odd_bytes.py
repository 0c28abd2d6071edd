# D 48: bytes that are no text, NUL, colours, a result of ours, and the markers of others come out as they are
# expect: status=ok stdout="\ufffd\ufffd\x00\x1b[31m{\"status\": \"timeout\"}\r@@E@@D\u00e9\n"
import os

os.write(1, b'\xff\xfe\x00\x1b[31m{"status": "timeout"}\r@@E@@D\xc3\xa9\n')
