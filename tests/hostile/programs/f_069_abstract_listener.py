# F 69: a program that listens on an abstract socket
# expect: status=ok
import socket
import time

try:
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        listener.bind("\0meet-69")
        listener.listen()
        listener.settimeout(0.8)
        ear.bind("\0meet-69-datagrams")
        ear.setblocking(False)
        try:
            listener.accept()
            print("escaped: somebody came")
        except TimeoutError:
            pass
        try:
            ear.recv(1)
            print("escaped: somebody wrote")
        except BlockingIOError:
            pass
except OSError:
    time.sleep(0.5)  # no sockets, or another copy of this has the name
print("contained")
