#!/bin/sh
# Lays out the layers of the images: FOLDER/plugin, FOLDER/agent, FOLDER/compat and FOLDER/driver.
#
#   layers.sh FOLDER GPU-DEVICE-PLUGIN GPU-NODE-AGENT STATIC-GPU-DRIVER STATIC-BUSYBOX [DEBIAN]
#
# DEBIAN is the root of a Debian of the programs' architecture, with libc6 and busybox-static; this machine's if it is not given.
set -eu

layers=$1
plugin=$2
agent=$3
driver=$4
busybox=$5
debian=${6:-}

# The programs, under the names by which NVIDIA's charts and operator start theirs too.
install -D -m 0755 "$plugin" "$layers/plugin/usr/bin/gpu-device-plugin"
for name in nvidia-device-plugin mps-control-daemon; do
  ln -s gpu-device-plugin "$layers/plugin/usr/bin/$name"
done
install -D -m 0755 "$agent" "$layers/agent/usr/bin/gpu-node-agent"
for name in gpu-feature-discovery config-manager; do
  ln -s gpu-node-agent "$layers/agent/usr/bin/$name"
done

# The C library that the programs are linked with, and the rest of that library which the driver's libnvidia-ml.so.1 asks for when it
# is loaded. There is no shell and nothing else to patch.
root=$layers/plugin
mkdir "$root/etc" "$root/tmp"
machine=$(od -An -j18 -N2 -tu2 "$plugin" | tr -d ' ') # as in the header of ELF
case $machine in
  62) libraries=/lib/x86_64-linux-gnu loader=/lib64/ld-linux-x86-64.so.2 ;;
  183) libraries=/lib/aarch64-linux-gnu loader=/lib/ld-linux-aarch64.so.1 ;;
  *) echo "layers.sh: $plugin is for the machine $machine of ELF, which has no image" >&2 && exit 1 ;;
esac
install -D -m 0755 "$debian$libraries/$(basename $loader)" "$root$loader"
for name in libc.so.6 libresolv.so.2 libdl.so.2 libm.so.6 libpthread.so.0 librt.so.1; do
  install -D -m 0755 "$debian$libraries/$name" "$root$libraries/$name"
done
# Where NVIDIA's container runtime puts the driver's libraries; the C library's loader looks there.
mkdir -p "$root/usr$libraries"
install -D -m 0644 "$debian/usr/share/doc/libc6/copyright" "$root/usr/share/doc/libc6/copyright"

# What NVIDIA's GPU operator starts the programs with: scripts for sh, for bash in versions before 25.3, at paths below /bin.
root=$layers/compat
install -D -m 0755 "$busybox" "$root/usr/bin/busybox"
for applet in sh cat echo grep ls lsmod sleep; do
  ln -s busybox "$root/usr/bin/$applet"
done
printf '#!/bin/sh\nexec sh "$@"\n' >"$root/usr/bin/bash"
chmod 0755 "$root/usr/bin/bash"
ln -s usr/bin "$root/bin"
install -D -m 0644 "$debian/usr/share/doc/busybox-static/copyright" "$root/usr/share/doc/busybox-static/copyright"

# The program that changes the driver of a node is static, because it also runs in the root of a driver's image.
install -D -m 0755 "$driver" "$layers/driver/usr/bin/gpu-driver"
