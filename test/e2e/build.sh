#!/usr/bin/env bash
# Builds what a real node is made of, each program once, into the folder named by its first argument:
#
#   build.sh CACHE 1.36.3 1.37.0
#
# gives CACHE/kubernetes-1.36.3/kubelet, CACHE/kubernetes-1.37.0/..., CACHE/containerd-2.4.2/.... The control plane is
# that of the newest Kubernetes, which Kubernetes' version skew policy allows for older kubelets.
set -euo pipefail

cache=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
control_plane=1.37.0
containerd=2.4.2

export CGO_ENABLED=0 GOFLAGS=-buildvcs=false

# phase NAME COMMAND... says how long COMMAND took.
phase() {
  local name=$1 start=$SECONDS
  shift
  "$@"
  printf 'e2e: %-38s %4d s\n' "$name" $((SECONDS - start))
}

# kubernetes VERSION PROGRAM builds one program of k8s.io/kubernetes. It is moved into place when whole, so that an
# interrupted build leaves nothing that looks like a result.
kubernetes() {
  local version=$1 program=$2 target=$cache/kubernetes-$1/$2
  local package=k8s.io/component-base/version
  (
    cd "$here/kubernetes/v$version"
    go build -trimpath -o "$target.part" \
      -ldflags "-s -w -X $package.gitVersion=v$version -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$version")" \
      "k8s.io/kubernetes/cmd/$program"
  )
  mv "$target.part" "$target"
}

containerd() {
  local target=$cache/containerd-$containerd
  rm -rf "$target.part" && mkdir -p "$target.part"
  for program in containerd containerd-shim-runc-v2 ctr; do
    GOBIN=$target.part go install -trimpath -ldflags \
      "-s -w -X github.com/containerd/containerd/v2/version.Version=v$containerd" \
      "github.com/containerd/containerd/v2/cmd/$program@v$containerd"
  done
  mv "$target.part" "$target"
}

for version in "$@"; do
  mkdir -p "$cache/kubernetes-$version"
  [ -x "$cache/kubernetes-$version/kubelet" ] || phase "build kubelet $version" kubernetes "$version" kubelet
done
[ -d "$cache/containerd-$containerd" ] || phase "build containerd $containerd" containerd
mkdir -p "$cache/kubernetes-$control_plane"
for program in kube-apiserver kube-controller-manager kube-scheduler kubectl; do
  [ -x "$cache/kubernetes-$control_plane/$program" ] ||
    phase "build $program $control_plane" kubernetes "$control_plane" "$program"
done
