#!/bin/sh
# Runs the isolation tests under another kernel: Debian's 6.1 with control groups v2, in QEMU by software emulation, as root.
# The machine has this machine's files, read-only, with a file system in memory on top; it needs no image and leaves nothing.
#
#     tests/vm/run.sh [COMMAND...]     in the checkout; what is run without a command is in tests/vm/checks.sh
#
# VM_MEMORY (MB, 6144) and VM_CORES (2) say how large it is, VM_APPEND adds to the kernel's command line, VM_PATIENCE_S (7200)
# ends it. The last line of what it prints is the command's exit code.
set -eu
cd "$(dirname "$0")/../.."
checkout=$PWD
here=tests/vm
tools=.tools/vm

say() { printf 'exec-service: %s\n' "$*" >&2; }

# Fetched once: the emulator into the system, the kernel unpacked into .tools.
get_tools() {
    for name in qemu-system-x86_64 busybox cpio; do command -v "$name" >/dev/null || missing=yes; done
    if [ -n "${missing:-}" ]; then
        [ "$(id -u)" = 0 ] || { say "apt-get install qemu-system-x86 busybox-static cpio"; exit 1; }
        say "installing QEMU"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends qemu-system-x86 busybox-static cpio >/dev/null
    fi
    [ ! -e "$tools/kernel/boot" ] || return 0
    # The plain kernel: the one for clouds has no 9p.
    kernel=$(apt-cache search --names-only '^linux-image-6\.1\.0-[0-9]+-amd64$' | cut -d' ' -f1 | sort -V | tail -1)
    [ -n "$kernel" ] || { say "this machine's package lists have no linux-image-6.1.0 (Debian 12 has it)"; exit 1; }
    say "fetching $kernel"
    rm -rf "$tools" && mkdir -p "$tools/download"
    (cd "$tools/download" && apt-get download -qq "$kernel")
    dpkg-deb -x "$tools"/download/*.deb "$tools/unpacked"
    rm -rf "$tools/download" && mv "$tools/unpacked" "$tools/kernel"
}

# In the order in which they are loaded.
MODULES="virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci netfs fscache 9pnet 9pnet_virtio 9p overlay"

make_initramfs() {
    root=$tools/initramfs
    rm -rf "$root" && mkdir -p "$root/bin" "$root/modules"
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp $here/init "$root/init"
    for module in $MODULES; do
        file=$(find "$tools/kernel/lib/modules" -name "$module.ko")
        [ -z "$file" ] || cp "$file" "$root/modules/" # what is built in has no file
        echo "$module" >>"$root/modules/order"
    done
    chmod 755 "$root/init"
    (cd "$root" && find . | cpio --quiet -o -H newc) | gzip -1 >"$tools/initramfs.gz"
}

get_tools
make_initramfs
[ $# -gt 0 ] || set -- sh $here/checks.sh
# The kernel's command line names this file: it has no room for quotes.
printf 'cd "%s"\n' "$checkout" >"$tools/command"
printf "'%s' " "$@" >>"$tools/command"
log=$tools/console.log
timeout --foreground "${VM_PATIENCE_S:-7200}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp "${VM_CORES:-2}" -m "${VM_MEMORY:-6144}" \
    -nodefaults -no-reboot -display none -serial stdio \
    -kernel "$(ls "$tools"/kernel/boot/vmlinuz-*)" -initrd "$tools/initramfs.gz" \
    -append "console=ttyS0 quiet panic=-1 cgroup_no_v1=all command=$checkout/$tools/command ${VM_APPEND:-}" \
    -virtfs local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap </dev/null | tee "$log"
grep -q '^the machine ends: 0' "$log"
