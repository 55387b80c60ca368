#!/bin/sh
# Lays out the image's whole root file system: the programs, the C library they were linked with, and the rest of that library which
# the driver's libnvidia-ml.so.1 asks for when it is loaded. There is no shell and nothing else to patch.
#
#   rootfs.sh FOLDER PROGRAM...
set -eu

root=$1
shift

mkdir -p "$root/usr/bin" "$root/etc" "$root/tmp"
install -m 0755 -t "$root/usr/bin" "$@"
# NVIDIA's charts start these by name.
ln -sf gpu-node-agent "$root/usr/bin/gpu-feature-discovery"
ln -sf gpu-node-agent "$root/usr/bin/config-manager"

# "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)" and "/lib64/ld-linux-x86-64.so.2 (0x...)".
linked=$(ldd "$@" | sed -nE 's/^.* => (\/[^ ]+) .*$/\1/p; s/^[[:space:]]*(\/[^ ]+) \(.*$/\1/p' | sort -u)
libc=$(printf '%s\n' "$linked" | grep '/libc\.so\.6$')
libraries=$(dirname "$libc")
for file in $linked $(for name in libdl.so.2 libm.so.6 libpthread.so.0 librt.so.1; do echo "$libraries/$name"; done); do
  mkdir -p "$root$(dirname "$file")"
  cp -L "$file" "$root$file"
done

# Where NVIDIA's container runtime puts the driver's libraries; the C library's loader looks there.
mkdir -p "$root/usr/lib/$(basename "$libraries")"
install -D -m 0644 /usr/share/doc/libc6/copyright "$root/usr/share/doc/libc6/copyright"
