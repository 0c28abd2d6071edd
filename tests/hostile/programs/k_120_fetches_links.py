# K 120: files to be fetched that are links, pipes and folders
# expect: status=ok files=
# fetch: link pipe folder link/etc/ld.so.cache link/main.py /tmp/link/etc/ld.so.cache
import os

os.symlink("/", "link")
os.mkfifo("pipe")
os.mkdir("folder")
print("contained")
