# K 148: holds names of sockets for a sibling to see
# expect: status=ok
import socket
import time

try:
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        one.bind("\0name-142")
        other.bind("\0name-142-datagrams")
        time.sleep(0.8)
except OSError as error:
    if error.errno == 98:  # EADDRINUSE
        print("escaped: the name of a sibling is in the way")
print("contained")
