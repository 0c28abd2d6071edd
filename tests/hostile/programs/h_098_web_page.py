# H 98: fetches a web page, and is told at once that it cannot
# expect: status=ok max_wall_s=3
import urllib.request

from attack import attempt, tell

for address in "http://example.com", "https://93.184.215.14", "http://127.0.0.1:8080/v1/info", "http://[::1]:8080":
    attempt(address, urllib.request.urlopen, address, None, 2)
tell()
