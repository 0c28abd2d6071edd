# F 78: reads what the host keeps to itself
# expect: status=ok
# needs: landlock|mntns
import os

from attack import attempt, tell

FILES = """/etc/shadow /etc/passwd /etc/hosts /etc/resolv.conf /etc/machine-id /proc/1/environ /proc/kcore /proc/keys /proc/kallsyms
/proc/self/root/etc/shadow /root/.bashrc /root/.ssh/id_rsa /.dockerenv /sys/kernel/uevent_seqnum""".split()
FOLDERS = """/root /home /run /var /var/run /run/secrets /var/run/secrets/kubernetes.io /sys/fs/cgroup /sys /boot /srv /work
/proc/1/root /proc/1/cwd /etc/ssh""".split()
for file in FILES:
    attempt(file, lambda path: open(path, "rb").read(1), file)
for folder in FOLDERS:
    if not os.sys.base_prefix.startswith(f"{folder}/"):  # the way to the interpreter may be seen, and nothing beside it
        attempt(folder, os.listdir, folder)
for path in "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/dbus/system_bus_socket", "/dev/log":
    attempt(path, lambda name: os.open(name, os.O_RDWR), path)
tell()
