# D 49: closes stdin, stdout and stderr
# expect: status=ok stdout="" completed=yes
import os

os.close(0)
os.close(1)
os.close(2)
