# The image for linux/amd64 and linux/arm64 (docker buildx build --platform linux/amd64,linux/arm64). The compiler runs on the machine
# that builds; only the few commands of the stage build run on the image's platform. The programs load libnvidia-ml.so.1 at run time,
# so they need the C library and cannot be static.
ARG GO_IMAGE=golang:1.26
FROM --platform=$BUILDPLATFORM ${GO_IMAGE} AS compile
ARG TARGETARCH
# A compiler for the other platform, if it is another.
RUN case "$(go env GOARCH)-${TARGETARCH}" in \
      amd64-arm64) packages='gcc-aarch64-linux-gnu libc6-dev-arm64-cross' cc=aarch64-linux-gnu-gcc ;; \
      arm64-amd64) packages='gcc-x86-64-linux-gnu libc6-dev-amd64-cross' cc=x86_64-linux-gnu-gcc ;; \
      *) packages= cc=gcc ;; \
    esac && \
    if [ -n "$packages" ]; then apt-get update && apt-get install -y --no-install-recommends $packages; fi && \
    ln -s "$(command -v $cc)" /usr/local/bin/target-cc
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
# go-nvml wraps all of NVML, what is deprecated in it too.
# The tags are those of the Makefile.
RUN GOARCH="${TARGETARCH:-$(go env GOARCH)}" CC=target-cc CGO_ENABLED=1 CGO_CFLAGS="-O2 -g -Wno-deprecated-declarations" \
    go build -trimpath -tags grpcnotrace,nethttpomithttp2,netgo \
      -ldflags "-s -w" -o /out/ ./cmd/gpu-device-plugin ./cmd/gpu-node-agent && \
    GOARCH="${TARGETARCH:-$(go env GOARCH)}" CGO_ENABLED=0 go build -trimpath -ldflags "-s -w" -o /out/ ./cmd/gpu-driver
# What the image is made of, and the licences' texts. Both platforms have the C library of the same Debian.
RUN CGO_ENABLED=0 go build -o /sbom ./hack/sbom && \
    for program in gpu-device-plugin gpu-node-agent; do \
      /sbom -libc "$(dpkg-query -W -f '${Version}' libc6)" /out/$program >/out/$program.spdx.json || exit 1; \
    done && \
    /sbom -format texts /out/gpu-node-agent >/out/licenses.txt && \
    /sbom /out/gpu-driver >/out/gpu-driver.json && /sbom -format texts /out/gpu-driver >/out/gpu-driver.txt

FROM ${GO_IMAGE} AS build
RUN apt-get update && apt-get install -y --no-install-recommends busybox-static
COPY --from=compile /out/ /out/
COPY deployments/image/layers.sh /
RUN /layers.sh /layers /out/gpu-device-plugin /out/gpu-node-agent /out/gpu-driver /bin/busybox && \
    install -D -m 0644 -t /layers/plugin/usr/share/doc/gpu-device-plugin /out/*.spdx.json /out/licenses.txt && \
    install -D -m 0644 /out/gpu-driver.json /layers/driver/usr/share/doc/gpu-driver/gpu-driver.spdx.json && \
    install -D -m 0644 /out/gpu-driver.txt /layers/driver/usr/share/doc/gpu-driver/licenses.txt

# The end-to-end tests read the stages from here on and assemble the images from them without a registry; they know FROM scratch or
# another of these stages, COPY --from=build, ENV, LABEL and ENTRYPOINT, and fail on anything else.
FROM scratch AS programs
LABEL org.opencontainers.image.source=https://github.com/gpu-device-plugin/gpu-device-plugin
LABEL org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /layers/plugin/ /
COPY --from=build /layers/agent/ /
# What NVIDIA's container runtime gives this container: every GPU's device nodes, the management library, and for GPUs
# that are shared by MPS the programs of MPS and CUDA's library.
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/usr/bin
# The user is root: the kubelet's sockets and folders are root's alone. The manifests take every capability away.
ENTRYPOINT ["gpu-device-plugin"]

# docker build --target compat: the image in the place of NVIDIA's where NVIDIA's GPU operator starts it. It has a shell.
FROM programs AS compat
COPY --from=build /layers/compat/ /

# docker build --target driver: the image that changes the driver of a node (docs/driver.md). It needs nothing of the others.
FROM scratch AS driver
LABEL org.opencontainers.image.source=https://github.com/gpu-device-plugin/gpu-device-plugin
LABEL org.opencontainers.image.licenses=Apache-2.0
COPY --from=build /layers/driver/ /
ENV PATH=/usr/bin
ENTRYPOINT ["gpu-driver"]

# The default: without a shell.
FROM programs
