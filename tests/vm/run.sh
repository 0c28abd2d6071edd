#!/bin/sh
# Runs the isolation tests on another machine: another kernel with control groups v2, in QEMU by software emulation, as root.
# The machine has this machine's files, read-only, with a file system in memory on top; it needs no image and leaves nothing.
#
#     MACHINE=debian-6.1 tests/vm/run.sh [COMMAND...]
#
# Without a command: tests/vm/checks.sh, at most ten minutes. The machines:
#     debian-6.1     Debian 12's kernel, as root
#     newest         Debian's newest kernel, as root
#     no-landlock    Debian 12's kernel without Landlock, as on RHEL 8 and RHEL 9 before 9.6; as root
#     no-userns      Debian 12's kernel without user namespaces, as a plain user
#     delegated      Debian 12's kernel, as a plain user who was given a control group, as by systemd-run --user -p Delegate=yes
# VM_MEMORY (MB, 6144) and VM_CORES (2) say how large it is, VM_APPEND adds to the kernel's command line, VM_PATIENCE_S (7200)
# ends it. The last line of what it prints is the command's exit code.
set -eu
cd "$(dirname "$0")/../.."
checkout=$PWD
here=tests/vm
tools=.tools/vm
machine=${MACHINE:-debian-6.1}
kernel=6.1 append="" user=root

say() { printf 'exec-service: %s\n' "$*" >&2; }

case $machine in
debian-6.1) ;;
newest) kernel=newest ;;
no-landlock) append="lsm=lockdown,yama" ;;
no-userns | delegated) user=nobody ;;
*) say "unknown machine: $machine (debian-6.1, newest, no-landlock, no-userns, delegated)"; exit 2 ;;
esac
tree=$tools/kernel-$kernel

get_emulator() {
    for name in qemu-system-x86_64 busybox cpio; do command -v "$name" >/dev/null || missing=yes; done
    [ -n "${missing:-}" ] || return 0
    [ "$(id -u)" = 0 ] || { say "apt-get install qemu-system-x86 busybox-static cpio"; exit 1; }
    say "installing QEMU"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends qemu-system-x86 busybox-static cpio >/dev/null
}

# The plain kernel: the one for clouds has no 9p. The newest is in sid, of which only this one package is unpacked.
get_kernel() {
    [ ! -e "$tree/boot" ] || return 0
    rm -rf "$tools/download" "$tree.unpacked" && mkdir -p "$tools/download/lists/partial"
    if [ "$kernel" = newest ]; then
        echo "deb http://deb.debian.org/debian sid main" >"$tools/download/sources.list"
        apt="-o Dir::Etc::sourcelist=$checkout/$tools/download/sources.list -o Dir::Etc::sourceparts=/dev/null
            -o Dir::State::lists=$checkout/$tools/download/lists -o Dir::Cache=$checkout/$tools/download"
        apt-get update -qq $apt
        pattern='^linux-image-[0-9.]+\+deb[0-9]+-amd64$'
    else
        apt="" pattern='^linux-image-6\.1\.0-[0-9]+-amd64$'
    fi
    package=$(apt-cache $apt search --names-only "$pattern" | cut -d' ' -f1 | sort -V | tail -1)
    [ -n "$package" ] || { say "this machine's package lists have no kernel like $pattern"; exit 1; }
    say "fetching $package"
    (cd "$tools/download" && apt-get $apt download -qq "$package")
    dpkg-deb -x "$tools"/download/*.deb "$tree.unpacked"
    rm -rf "$tools/download" && mv "$tree.unpacked" "$tree"
}

# In the order in which they are loaded.
MODULES="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci netfs fscache 9pnet 9pnet_virtio 9p overlay"

make_initramfs() {
    root=$tools/initramfs
    rm -rf "$root" && mkdir -p "$root/bin" "$root/modules"
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp $here/init "$root/init"
    for module in $MODULES; do
        file=$(find "$tree/" -path '*/modules/*' -name "$module.ko*")
        case $file in
        "") ;; # what is built in has no file
        *.xz) xz -dc "$file" >"$root/modules/$module.ko" ;;
        *.zst) zstd -qdc "$file" >"$root/modules/$module.ko" ;;
        *) cp "$file" "$root/modules/" ;;
        esac
        echo "$module" >>"$root/modules/order"
    done
    chmod 755 "$root/init"
    (cd "$root" && find . | cpio --quiet -o -H newc) | gzip -1 >"$tools/initramfs.gz"
}

get_emulator
get_kernel
make_initramfs
[ $# -gt 0 ] || set -- sh $here/checks.sh
# The kernel's command line names this file: it has no room for quotes.
printf 'cd "%s"\n' "$checkout" >"$tools/command"
printf "'%s' " "$@" >>"$tools/command"
log=$tools/console.log
timeout --foreground "${VM_PATIENCE_S:-7200}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp "${VM_CORES:-2}" -m "${VM_MEMORY:-6144}" \
    -nodefaults -no-reboot -display none -serial stdio \
    -kernel "$(ls "$tree"/boot/vmlinuz-*)" -initrd "$tools/initramfs.gz" \
    -append "console=ttyS0 quiet panic=-1 cgroup_no_v1=all machine=$machine user=$user command=$checkout/$tools/command $append ${VM_APPEND:-}" \
    -virtfs local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap </dev/null | tee "$log"
grep -q '^the machine ends: 0' "$log"
