#!/bin/sh
# Lays out the layers of the images: FOLDER/plugin, FOLDER/agent and FOLDER/compat.
#
#   layers.sh FOLDER GPU-DEVICE-PLUGIN GPU-NODE-AGENT STATIC-BUSYBOX
set -eu

layers=$1
plugin=$2
agent=$3
busybox=$4

# The programs, under the names by which NVIDIA's charts and operator start theirs too.
install -D -m 0755 "$plugin" "$layers/plugin/usr/bin/gpu-device-plugin"
for name in nvidia-device-plugin mps-control-daemon; do
  ln -s gpu-device-plugin "$layers/plugin/usr/bin/$name"
done
install -D -m 0755 "$agent" "$layers/agent/usr/bin/gpu-node-agent"
for name in gpu-feature-discovery config-manager; do
  ln -s gpu-node-agent "$layers/agent/usr/bin/$name"
done

# The C library that the programs were linked with, and the rest of that library which the driver's libnvidia-ml.so.1 asks for when it
# is loaded. There is no shell and nothing else to patch.
root=$layers/plugin
mkdir "$root/etc" "$root/tmp"
# "libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)" and "/lib64/ld-linux-x86-64.so.2 (0x...)".
linked=$(ldd "$plugin" "$agent" | sed -nE 's/^.* => (\/[^ ]+) .*$/\1/p; s/^[[:space:]]*(\/[^ ]+) \(.*$/\1/p' | sort -u)
libc=$(printf '%s\n' "$linked" | grep '/libc\.so\.6$')
libraries=$(dirname "$libc")
for file in $linked $(for name in libdl.so.2 libm.so.6 libpthread.so.0 librt.so.1; do echo "$libraries/$name"; done); do
  mkdir -p "$root$(dirname "$file")"
  cp -L "$file" "$root$file"
done
# Where NVIDIA's container runtime puts the driver's libraries; the C library's loader looks there.
mkdir -p "$root/usr/lib/$(basename "$libraries")"
install -D -m 0644 /usr/share/doc/libc6/copyright "$root/usr/share/doc/libc6/copyright"

# What NVIDIA's GPU operator starts the programs with: scripts for sh, for bash in versions before 25.3, at paths below /bin.
root=$layers/compat
install -D -m 0755 "$busybox" "$root/usr/bin/busybox"
for applet in sh cat echo grep ls lsmod sleep; do
  ln -s busybox "$root/usr/bin/$applet"
done
printf '#!/bin/sh\nexec sh "$@"\n' >"$root/usr/bin/bash"
chmod 0755 "$root/usr/bin/bash"
ln -s usr/bin "$root/bin"
install -D -m 0644 /usr/share/doc/busybox-static/copyright "$root/usr/share/doc/busybox-static/copyright"
