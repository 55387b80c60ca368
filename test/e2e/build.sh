#!/usr/bin/env bash
# Builds what a run needs. What a real node is made of is built once:
#
#   build.sh CACHE WORK 1.36.3 1.37.0
#
# gives CACHE/kubernetes-1.36.3/kubelet, CACHE/kubernetes-1.37.0/kube-apiserver and the other programs of the control plane,
# CACHE/etcd-3.7.0/etcd, CACHE/containerd-2.4.2/..., CACHE/helm-4.3.1/helm. What is tested is built for each run: WORK/image, the layers
# of the daemon's images, the package of the chart, WORK/nvidia-cuda-mps-control, WORK/kubectl-gpu, and WORK/e2e.test.
set -euo pipefail

cache=$1
work=$2
kubelet=$3
control_plane=$4
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
etcd=3.7.0 # that of the newest control plane's go.mod
containerd=2.4.2
helm=4.3.1
. "$here/lib.sh"

export CGO_ENABLED=0 GOFLAGS=-buildvcs=false

# kubernetes VERSION PROGRAM builds one program of k8s.io/kubernetes. It is moved into place when whole, so that an
# interrupted build leaves nothing that looks like a result.
kubernetes() {
  local version=$1 program=$2 target=$cache/kubernetes-$1/$2
  local package=k8s.io/component-base/version
  (
    cd "$here/kubernetes/v$version"
    again go build -trimpath -o "$target.part" \
      -ldflags "-s -w -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$version")" \
      "k8s.io/kubernetes/cmd/$program"
  )
  mv "$target.part" "$target"
}

etcd() {
  local target=$cache/etcd-$etcd
  rm -rf "$target.part" && mkdir -p "$target.part"
  (cd "$here/etcd" && again go build -trimpath -ldflags "-s -w" -o "$target.part/etcd" go.etcd.io/etcd/server/v3)
  mv "$target.part" "$target"
}

containerd() {
  local target=$cache/containerd-$containerd
  rm -rf "$target.part" && mkdir -p "$target.part"
  for program in containerd containerd-shim-runc-v2 ctr; do
    GOBIN=$target.part again go install -trimpath -ldflags \
      "-s -w -X github.com/containerd/containerd/v2/version.Version=v$containerd" \
      "github.com/containerd/containerd/v2/cmd/$program@v$containerd"
  done
  mv "$target.part" "$target"
}

helm() {
  local target=$cache/helm-$helm
  rm -rf "$target.part" && mkdir -p "$target.part"
  GOBIN=$target.part again go install -trimpath -ldflags "-s -w" "helm.sh/helm/v4/cmd/helm@v$helm"
  mv "$target.part" "$target"
}

daemon() {
  rm -rf "$work/image" && mkdir -p "$work/image"
  (
    cd "$root"
    # As make build does; go-nvml wraps all of NVML, what is deprecated in it too.
    CGO_ENABLED=1 CGO_CFLAGS="-O2 -g -Wno-deprecated-declarations" \
      again go build -trimpath -tags grpcnotrace,nethttpomithttp2,netgo -ldflags "-s -w" -o "$work/" ./cmd/gpu-device-plugin ./cmd/gpu-node-agent
    CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o "$work/" ./cmd/gpu-driver
  )
  (cd "$root" && go build -o "$work/nvidia-cuda-mps-control" ./test/mps)
  (cd "$root/cmd/kubectl-gpu" && again go build -o "$work/kubectl-gpu" .)
  make --no-print-directory -C "$root" chart DIST="$work"
  "$root/deployments/image/layers.sh" "$work/image" "$work/gpu-device-plugin" "$work/gpu-node-agent" "$work/gpu-driver" \
    /bin/busybox
}

tests() (
  cd "$here"
  CGO_ENABLED=1 again go test -c -o "$work/e2e.test" . # make check has compiled most of that
)

# What may not compile comes first: the rest takes long.
if [ ! -x "$work/e2e.test" ]; then
  phase "daemon and its image's files" daemon
  phase "test program" tests
fi
mkdir -p "$cache/kubernetes-$kubelet" "$cache/kubernetes-$control_plane"
[ -x "$cache/kubernetes-$kubelet/kubelet" ] || phase "build kubelet $kubelet" kubernetes "$kubelet" kubelet
[ -d "$cache/etcd-$etcd" ] || phase "build etcd $etcd" etcd
[ -d "$cache/containerd-$containerd" ] || phase "build containerd $containerd" containerd
[ -d "$cache/helm-$helm" ] || phase "build helm $helm" helm
for program in kube-apiserver kube-controller-manager kube-scheduler kubectl; do
  [ -x "$cache/kubernetes-$control_plane/$program" ] ||
    phase "build $program $control_plane" kubernetes "$control_plane" "$program"
done
