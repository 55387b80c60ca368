# The binary loads libnvidia-ml.so.1 at run time, so it needs the C library and cannot be static.
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=v0.0.0-dev
# go-nvml wraps all of NVML, what is deprecated in it too.
ENV CGO_ENABLED=1 CGO_CFLAGS="-O2 -g -Wno-deprecated-declarations"
RUN go build -trimpath \
      -ldflags "-s -w -X github.com/gpu-device-plugin/gpu-device-plugin/internal/version.version=${VERSION}" \
      -o /gpu-device-plugin ./cmd/gpu-device-plugin
RUN deployments/image/rootfs.sh /gpu-device-plugin /rootfs
# What the image is made of, and the licences' texts.
RUN mkdir -p /rootfs/usr/share/doc/gpu-device-plugin && cd /rootfs/usr/share/doc/gpu-device-plugin && \
    go build -C /src -o /sbom ./hack/sbom && \
    (cd /src && /sbom -version "${VERSION}" -libc "$(dpkg-query -W -f '${Version}' libc6)" /gpu-device-plugin) >sbom.spdx.json && \
    (cd /src && /sbom -format texts /gpu-device-plugin) >licenses.txt

# The end-to-end tests read this stage and assemble the image from it without a registry; they know FROM scratch, COPY
# --from=build, ENV, LABEL and ENTRYPOINT, and fail on anything else.
FROM scratch
LABEL org.opencontainers.image.source=https://github.com/gpu-device-plugin/gpu-device-plugin
LABEL org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /rootfs/ /
# What NVIDIA's container runtime gives this container: every GPU's device nodes, the management library, and for GPUs
# that are shared by MPS the programs of MPS and CUDA's library.
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/usr/bin
# The user is root: the kubelet's sockets and folders are root's alone. The manifests take every capability away.
ENTRYPOINT ["gpu-device-plugin"]
