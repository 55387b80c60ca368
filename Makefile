# gpu-device-plugin. `make help` lists the targets in groups: try, build, test, release, slow. A target says
# its group after "##". All need Go, gcc and make beforehand, e2e needs root and Debian, and image needs docker. The
# rest is fetched at a pinned version into $(TOOLS), outside the tree.

GO      ?= go
DOCKER  ?= docker
PROFILE ?= dgx-h100
IMAGE   ?= ghcr.io/gpu-device-plugin/gpu-device-plugin
VERSION := $(shell sed -n 's/^const Number = "\(.*\)"/\1/p' internal/base/version/version.go)
# With the digest of the base image: make image GO_IMAGE=golang:1.26@sha256:...
GO_IMAGE ?= golang:1.26

LDFLAGS := -s -w
# Without gRPC's tracing, whose HTML templates keep the linker from leaving methods out that nothing calls, and without HTTP/2 in
# net/http, which only TLS uses, the binary is 4 MB smaller and so is the daemon's resident memory.
# The C library's resolver, which the image has no configuration for, is not linked.
TAGS    := grpcnotrace,nethttpomithttp2,netgo
# NVML is called through cgo. go-nvml wraps all of NVML, what is deprecated in it too.
export CGO_ENABLED := 1
export CGO_CFLAGS  := -O2 -g -Wno-deprecated-declarations

# One folder for each Go version, because a linter built with an older Go refuses newer code.
TOOLS        ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-device-plugin/tools/$(shell $(GO) env GOVERSION)
GOLANGCI     := v2.15.0
GOLANGCI_BIN := $(TOOLS)/golangci-lint-$(GOLANGCI)/golangci-lint
# Prometheus and promtool, without its ways to discover targets. hack/prometheus has the newest version whose modules can be had.
PROMETHEUS     := $(shell awk '$$1 == "github.com/prometheus/prometheus" {print $$2}' hack/prometheus/go.mod)
PROMETHEUS_BIN := $(TOOLS)/prometheus-$(PROMETHEUS)
# The newest logcheck that can be had knows klog.Logger only without type aliases.
LOGCHECK     := GODEBUG=gotypesalias=0 $(GO) tool -modfile=hack/tools/go.mod logcheck -check-contextual -check-value -config hack/logcheck.conf

# The other modules of this repository whose dependencies are small enough to vet and tidy in every check.
MODULES := cmd/kubectl-gpu test/manifests test/e2e

# And one with kubelet itself, which is vetted only: its tests must build before they run last.
VETTED := test/e2e/devicemanager

.DEFAULT_GOAL := help

.PHONY: help
help: ## try: Show this list
	@for group in try build test release slow; do \
	  printf '\n%s\n' "$$group"; \
	  sed -nE "s/^([a-z0-9-]+):.* ## $$group: (.*)/\1 \2/p" $(MAKEFILE_LIST) | while read -r target text; do \
	    printf '%s\n' "$$text" | fold -s -w 54 | awk -v target="make $$target" '{sub(/ $$/, ""); printf "  %-24s%s\n", target, $$0; target = ""}'; \
	  done; \
	done

.PHONY: build
build: kubectl-gpu ## build: Build bin/gpu-device-plugin, gpu-node-agent, gpu-driver and kubectl-gpu
	$(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

.PHONY: kubectl-gpu
kubectl-gpu: ## build: Build bin/kubectl-gpu, the plugin of kubectl
	cd cmd/kubectl-gpu && $(GO) build -ldflags '$(LDFLAGS)' -o ../../bin/ .

.PHONY: cross
cross: ## build: Build the programs for arm64 with Debian's cross compiler, which it installs
	hack/cross '$(LDFLAGS)' $(TAGS)

.PHONY: sbom
sbom: build ## release: Write the SBOMs of the programs into dist/, as SPDX 2.3
	@mkdir -p dist
	@set -e; for p in gpu-device-plugin gpu-node-agent; do $(GO) run ./hack/sbom bin/$$p >dist/$$p.spdx.json; done

.PHONY: licenses
licenses: build ## release: Write docs/dev/licenses.md: the licences of all modules in the programs
	@sed '/^| module /,$$d' docs/dev/licenses.md >docs/dev/licenses.md.new
	@$(GO) run ./hack/sbom -format licenses bin/gpu-node-agent >>docs/dev/licenses.md.new
	@mv docs/dev/licenses.md.new docs/dev/licenses.md

DIST ?= dist

.PHONY: chart
chart: ## build: Pack the Helm chart into dist/ (DIST=folder)
	@mkdir -p $(DIST)
	tar -C deployments/helm --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=u=rwX,go=rX \
	  -czf $(DIST)/gpu-device-plugin-$(VERSION:v%=%).tgz gpu-device-plugin

# The private key that signs the provenance, and the URI of who or what builds; docs/dev/verify.md.
KEY     ?=
BUILDER ?=

.PHONY: release
release: ## release: Write programs, chart, images, their SBOMs and provenance, and checksums into dist/ (Debian on amd64; KEY=release.pem signs)
	KEY='$(KEY)' BUILDER='$(BUILDER)' hack/release $(VERSION) $(IMAGE)

.PHONY: set-version
set-version: ## release: Write the version of the next release into the program, chart and manifests (TO=v0.2.0)
	@case '$(TO)' in (v[0-9]*.[0-9]*.[0-9]*) ;; (*) echo 'give the version: make set-version TO=v0.2.0'; exit 1 ;; esac
	sed -i 's/^const Number = .*/const Number = "$(TO)"/' internal/base/version/version.go
	sed -i 's/^version: .*/version: $(TO:v%=%)/; s/^appVersion: .*/appVersion: $(TO)/' deployments/helm/gpu-device-plugin/Chart.yaml
	sed -i 's#$(IMAGE):v[^ ]*#$(IMAGE):$(TO)#' deployments/*/*.yaml deployments/helm/gpu-device-plugin/Chart.yaml

# As tests are built, so that make test after it has less to compile.
.PHONY: laptop
laptop:
	@echo 'building the daemon and a stand-in kubelet (about a minute the first time)'
	@hack/progress $(GO) build -v -ldflags '-s -w' -o bin/ ./cmd/gpu-device-plugin ./test/kubelet/cmd/laptop

.PHONY: run
run: laptop ## try: Run the daemon on simulated GPUs with a stand-in kubelet until Ctrl-C (PROFILE=dgx-h100)
	@bin/laptop run --daemon bin/gpu-device-plugin --profile $(PROFILE)

.PHONY: recording
recording: laptop ## build: Write docs/run.svg: what make run shows while a GPU fails and recovers
	$(GO) run ./hack/recording bin docs/run.svg

.PHONY: demo
demo: laptop ## try: Show a GPU fail and recover, a kubelet restart and an unplugged GPU, in 20 seconds
	@bin/laptop demo --daemon bin/gpu-device-plugin --profile $(PROFILE)

.PHONY: demo-mig
demo-mig: laptop ## try: Show a node change from whole GPUs to MIG devices and back under running pods, in 30 seconds
	@bin/laptop demo-mig --daemon bin/gpu-device-plugin --profile $(PROFILE)

# What only make test-all and the other targets need: real processes for minutes, or programs of a cluster.
LONG := bench|faults|fleet|monitoring|mps|soak

# Tests mostly wait for sockets and processes, so more of them run at a time than there are cores. make check vets.
TESTFLAGS := -vet=off -parallel 16
# So do packages. What waits the longest begins first.
PACKAGES = -p $$((2 * $$(nproc)))
FIRST := ./test/daemon ./test/mps ./test/soak

.PHONY: test
test: ## test: Run the tests of every package without the race detector (some minutes the first time)
	$(GO) test -short $(TESTFLAGS) $(PACKAGES) $$($(GO) list ./... | grep -Ev '/test/($(LONG))(/|$$)')
	cd cmd/kubectl-gpu && $(GO) test -short $(TESTFLAGS) ./...

.PHONY: test-all
test-all: ## slow: Run all tests with the race detector, whole daemons, MPS and a short soak (10 minutes)
	$(GO) test -race $(TESTFLAGS) $(PACKAGES) -timeout 15m $(FIRST) ./...
	cd cmd/kubectl-gpu && $(GO) test -race $(TESTFLAGS) -timeout 15m ./...

# A number of inputs, not a duration: at the end of a duration `go test` may take its own deadline for a failure.
FUZZTIME ?= 100000x

.PHONY: fuzz
fuzz: ## test: Fuzz the configuration parser and the gRPC calls (FUZZTIME=100000x inputs each)
	$(GO) test ./internal/config -run '^$$' -fuzz '^FuzzResolve$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/plan/dra -run '^$$' -fuzz '^FuzzParseConfig$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/plan/listing -run '^$$' -fuzz '^FuzzAllocate$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/plan/listing -run '^$$' -fuzz '^FuzzGetPreferredAllocation$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/gpu/nvidia -run '^$$' -fuzz '^FuzzLibrary$$' -fuzztime 2000x

# The packages that are mutated, how many mutations of each, and the seed of the choice (make mutate prints it).
MUTATE     ?= ./internal/gpu/health ./internal/plan/resource ./internal/gpu/topology ./internal/plan/containeredits
MUTATIONS  ?= 60
MUTATESEED ?= $(shell date +%s)

.PHONY: mutate
mutate: ## slow: Change the code at random places and print the changes that no test notices (MUTATE=./internal/gpu/health MUTATIONS=60 MUTATESEED=1)
	$(GO) run ./hack/mutate -n $(MUTATIONS) -seed $(MUTATESEED) $(MUTATEFLAGS) $(MUTATE)

.PHONY: bench
bench: build ## test: Print the figures of the benchmark beside their targets
	$(GO) run ./test/bench --daemon bin/gpu-device-plugin

.PHONY: faults
faults: build ## slow: Inject every fault and print what the kubelet saw (4 minutes; FAULTS_FLAGS='-run TestFaults/XID')
	$(GO) test ./test/faults -count=1 -v -timeout 15m -parallel 20 -daemon $(CURDIR)/bin/gpu-device-plugin $(FAULTS_FLAGS)

# How long, and the seed of what happens; 0 for another each time (it is printed).
TIME ?= 10m
SEED ?= 0

.PHONY: soak
soak: build ## slow: Run random actions against a daemon and check that its rules hold (TIME=60m SEED=7); drawing and logs in dist/soak
	$(GO) run ./test/soak --daemon bin/gpu-device-plugin --time $(TIME) --seed $(SEED) --out dist/soak $(SOAK_FLAGS)

# Where make e2e leaves the API server and the etcd that it builds.
E2E_BUILT = $(or $(E2E_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-device-plugin/e2e)
KUBERNETES ?= $(E2E_BUILT)/kubernetes-1.37.0
ETCD ?= $(E2E_BUILT)/etcd-3.7.0/etcd
HELM ?= $(E2E_BUILT)/helm-4.3.1/helm
# The newest version whose module can be had.
KUEUE := 0.19.2

.PHONY: fleet
fleet: ## slow: Start 5,000 nodes at a real API server and print how soon it answers (after make e2e; FLEET_FLAGS='-nodes 500')
	@test -x $(KUBERNETES)/kube-apiserver || { echo 'no kube-apiserver in $(KUBERNETES): run make e2e first, or set KUBERNETES'; exit 1; }
	@test -x $(ETCD) || { echo 'no etcd at $(ETCD): run make e2e first, or set ETCD'; exit 1; }
	$(GO) test ./test/fleet -count=1 -v -timeout 60m -kubernetes $(KUBERNETES) -etcd $(ETCD) $(FLEET_FLAGS)

.PHONY: kueue
kueue: build ## slow: Hold Jobs to a quota of GPU memory with Kueue's own controller (after make e2e; the first run builds Kueue)
	@test -x $(KUBERNETES)/kube-apiserver || { echo 'no kube-apiserver in $(KUBERNETES): run make e2e first, or set KUBERNETES'; exit 1; }
	@test -x $(ETCD) || { echo 'no etcd at $(ETCD): run make e2e first, or set ETCD'; exit 1; }
	@test -x $(HELM) || { echo 'no Helm at $(HELM): run make e2e first, or set HELM'; exit 1; }
	test/e2e/kueue $(E2E_BUILT) $(KUEUE)
	$(GO) test ./test/fleet -count=1 -v -run '^TestKueue$$' -timeout 20m -kubernetes $(KUBERNETES) -etcd $(ETCD) -helm $(HELM) \
	  -kueue $(E2E_BUILT)/kueue-$(KUEUE) -agent $(CURDIR)/bin/gpu-node-agent

# Checkouts with what docs/dev/testing-e2e.md has built in them. Without one, its recipe is skipped.
KURED                     ?=
NODE_HEALTHCHECK          ?=
NODE_READINESS_CONTROLLER ?=
NVSENTINEL                ?=

.PHONY: recipes
recipes: build ## slow: Run the recipes with the controllers that they are for (after make e2e; KURED=DIR, NODE_HEALTHCHECK=DIR, NODE_READINESS_CONTROLLER=DIR, NVSENTINEL=DIR)
	@test -x $(KUBERNETES)/kube-apiserver || { echo 'no kube-apiserver in $(KUBERNETES): run make e2e first, or set KUBERNETES'; exit 1; }
	@test -x $(ETCD) || { echo 'no etcd at $(ETCD): run make e2e first, or set ETCD'; exit 1; }
	@test -x $(HELM) || { echo 'no Helm at $(HELM): run make e2e first, or set HELM'; exit 1; }
	test/e2e/clusterapi/build $(E2E_BUILT)
	$(GO) test ./test/fleet -count=1 -v -run '^TestRecipe' -timeout 20m -kubernetes $(KUBERNETES) -etcd $(ETCD) -helm $(HELM) \
	  -agent $(CURDIR)/bin/gpu-node-agent \
	  -cluster-api $(E2E_BUILT)/clusterapi-$(shell awk '$$1 == "sigs.k8s.io/cluster-api" {print substr($$2, 2); exit}' test/e2e/clusterapi/go.mod) \
	  -kured '$(KURED)' -node-healthcheck '$(NODE_HEALTHCHECK)' -node-readiness-controller '$(NODE_READINESS_CONTROLLER)' \
	  -nvsentinel '$(NVSENTINEL)'

.PHONY: e2e
e2e: e2e-devicemanager e2e-monitoring e2e-node ## slow: Run the daemon on real kubelets (root; the first run builds Kubernetes; E2E_FLAGS='--kubelet 1.37')

MIGLAYOUTS ?= 1000

.PHONY: mig-layouts
mig-layouts: ## slow: Run random sequences of MIG layouts with pods, faults and kills (MIGLAYOUTS=1000 SEED=0)
	$(GO) test ./internal/mig -count=1 -run TestRandomLayouts -timeout 1h -sequences $(MIGLAYOUTS) -seed $(SEED)

.PHONY: nightly
nightly: ## slow: Run the fault matrix, soak, long stories, older kubelets and a release (90 minutes)
	@failed=; \
	 $(MAKE) --no-print-directory --keep-going nightly-node nightly-old nightly-pace || failed=yes; \
	 $(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target nightly-devicemanager nightly-lead faults soak mig-layouts ptx \
	   nightly-random nightly-fleet kueue recipes containerd release || failed=yes; \
	 [ -z "$$failed" ]

# The parts of make nightly that are not targets of their own use. One that fails ends none of the others. Nothing runs beside the real
# nodes, whose stories depend on time; of the other parts, which wait most of the time, two run at once.
.PHONY: nightly-random nightly-lead nightly-fleet nightly-devicemanager nightly-node nightly-old nightly-pace
nightly-random:
	GPU_FAULTS=1000 $(GO) test ./internal/cluster -count=1 -run 'TestRandomFaults$$' -timeout 1h
	$(GO) test -race ./internal/gpu/monitor -count=1 -run TestRandomFaults -timeout 1h -stories 50
	$(GO) test -race ./internal/kubelet/serve -count=1 -run TestDaemonsWithDifferentLists -timeout 1h -rollouts 5
nightly-lead:
	$(GO) test ./test/daemon -count=1 -run TestOneDecides -timeout 1h -stopped 5m
nightly-fleet:
	cd cmd/kubectl-gpu && $(GO) test ./internal/command -count=1 -v -run TestFleet -fleet
nightly-devicemanager:
	test/e2e/devicemanager/run -minutes
nightly-node:
	cd test/e2e && E2E_LIMIT=7200 E2E_KEEP_GOING=yes ./run --kubelet 1.37,1.36 -long
nightly-old:
	cd test/e2e && E2E_KEEP_GOING=yes ./run --kubelet 1.35,1.34
nightly-pace:
	cd test/e2e && E2E_KEEP_GOING=yes ./run --kubelet 1.37,1.36 -long -pairs 200 -test.run 'TestClaims/pace_of_claims$$'

.PHONY: e2e-node
e2e-node: ## slow: Run the stories on real single-node clusters (root; E2E_FLAGS='--kubelet 1.34')
	cd test/e2e && ./run $(E2E_FLAGS)

.PHONY: containerd
containerd: ## slow: Compare doctor's reading of containerd's files with containerd 1.7, 2.2 and 2.4
	$(GO) test -tags containerd -count=1 ./test/containerd

.PHONY: real
real: ## slow: Test with NVIDIA's own libraries from Debian's archive (root, Debian)
	@parts=$$(test/real/parts) || { [ $$? = 3 ] && echo 'real: LEFT OUT: NVIDIA'"'"'s parts cannot be had here'; exit; }; \
	 cd test/real && $(GO) test -count=1 -timeout 10m -parts "$$parts"

# The guest has no hardware acceleration: one at a time.
DRIVERVM = parts=$$(test/drivervm/parts $(1)) || { [ $$? = 3 ] && echo '$@: LEFT OUT: QEMU and kernels cannot be had here'; exit; }; \
  $(GO) test ./test/drivervm -count=1 -v -parts "$$parts"

.PHONY: driver-vm
driver-vm: ## slow: Change drivers in a VM with Debian's kernel, with 200 power cuts (Debian on amd64; 20 minutes; CUTS=200 SEED=7)
	@$(call DRIVERVM,-long) -timeout 30m -open -cuts $(or $(CUTS),200) -seed $(or $(SEED),0)

.PHONY: driver-vm-short
driver-vm-short: ## slow: The same with 8 power cuts and without NVIDIA's own module (3 minutes)
	@$(call DRIVERVM) -timeout 10m -cuts $(or $(CUTS),8) -seed $(or $(SEED),0)

.PHONY: hardware
hardware: build ## slow: Test with the NVIDIA GPU of this machine, whose settings stay unchanged (root; 4 minutes)
	$(GO) build -o bin/client ./test/hardware/client
	$(GO) test ./test/hardware -count=1 -v -timeout 10m -daemon $(CURDIR)/bin/gpu-device-plugin -client $(CURDIR)/bin/client $(HARDWARE_FLAGS)
	$(GO) test ./test/hardware/kubelet -count=1 -v -timeout 10m -daemon $(CURDIR)/bin/gpu-device-plugin -client $(CURDIR)/bin/client \
	  -programs $(E2E_BUILT) $(HARDWARE_FLAGS)

.PHONY: ptx
ptx: ## slow: Compile the kernel of validate with the PTX assemblers in Debian's archive (Debian)
	@suites=$$(test/real/ptxas) || { [ $$? = 3 ] && echo 'ptx: LEFT OUT: CUDA'"'"'s toolkits cannot be had here'; exit; }; \
	 $(GO) test ./test/real -count=1 -v -run '^TestKernel' -ptxas "$$suites"

.PHONY: e2e-devicemanager
e2e-devicemanager: ## slow: Compare the stand-in kubelet with the kubelet's own device manager of 1.36 and 1.37 (root)
	test/e2e/devicemanager/run

.PHONY: e2e-monitoring
e2e-monitoring: build $(PROMETHEUS_BIN)/promtool ## slow: Test the alerts and the dashboard with a real Prometheus that scrapes a simulated node
	$(GO) test ./test/monitoring -count=1 -v -timeout 10m -daemon $(CURDIR)/bin/gpu-device-plugin -tools $(PROMETHEUS_BIN)

.PHONY: fmt
fmt: $(GOLANGCI_BIN) ## test: Format the code
	$(GOLANGCI_BIN) fmt ./...

.PHONY: lint
lint: check-vet check-lint check-log ## test: Run go vet, golangci-lint and logcheck

.PHONY: check
check: check-format check-vet check-lint check-log check-imports ## test: Check format, linters, imports, modules, manifests and vulnerabilities
check: check-modules check-manifests vulncheck
	@echo 'check: all passed'

.PHONY: check-format
check-format:
	@out=$$(gofmt -l $$(git ls-files -co --exclude-standard '*.go')); \
	[ -z "$$out" ] || { printf 'not formatted; run make fmt:\n%s\n' "$$out"; exit 1; }

.PHONY: check-vet
check-vet:
	$(GO) vet ./...
	@set -e; for m in $(MODULES) $(VETTED); do echo "$(GO) vet $$m"; (cd $$m && $(GO) vet ./...); done

.PHONY: check-lint
check-lint: $(GOLANGCI_BIN)
	$(GOLANGCI_BIN) run --allow-parallel-runners ./...
	@set -e; for m in $(MODULES); do echo "golangci-lint run $$m"; (cd $$m && $(GOLANGCI_BIN) run --allow-parallel-runners ./...); done

.PHONY: check-log
check-log:
	$(LOGCHECK) ./...

.PHONY: check-imports
check-imports:
	$(GO) test ./test/arch

.PHONY: check-modules
check-modules:
	$(GO) mod tidy -diff
	@set -e; for m in hack/tools $(MODULES); do echo "$(GO) mod tidy $$m"; (cd $$m && $(GO) mod tidy -diff); done
	@set -e; cd test/e2e/devicemanager; for f in *.mod; do echo "$(GO) list -modfile=$$f test/e2e/devicemanager"; \
	  $(GO) list -mod=readonly -modfile=$$f -tags=$${f%.mod} -deps -test ./... >/dev/null; done

.PHONY: check-manifests
check-manifests:
	cd test/manifests && $(GO) test ./...

# Another copy of the Go vulnerability database, such as file:///srv/vulndb.
VULNDB ?=

.PHONY: vulncheck
vulncheck: ## test: Look for known vulnerabilities in the code that is used (VULNDB=file:///path)
	@status=0; out=$$($(GO) tool -modfile=hack/tools/go.mod govulncheck $(if $(VULNDB),-db $(VULNDB)) ./cmd/... 2>&1) || status=$$?; \
	printf '%s\n' "$$out"; \
	case "$${status}$(VULNDB) $$out" in \
	(0*) ;; \
	("1 govulncheck: fetching vulnerabilities:"*) \
	  echo 'vulncheck: NOT DONE: the Go vulnerability database cannot be reached from here. Run make vulncheck where it can be,'; \
	  echo 'or with a copy of it: make vulncheck VULNDB=file:///path' ;; \
	(*) exit 1 ;; \
	esac

.PHONY: image
image: ## build: Build the container image with docker (DOCKER=podman, PLATFORM=linux/amd64,linux/arm64, TARGET=compat, or driver)
	@command -v $(DOCKER) >/dev/null || { echo 'no $(DOCKER): apt-get install podman; make image DOCKER=podman'; exit 1; }
	$(DOCKER) build $(if $(PLATFORM),--platform $(PLATFORM)) $(if $(TARGET),--target $(TARGET)) --build-arg GO_IMAGE=$(GO_IMAGE) \
	  -t $(IMAGE):$(VERSION)$(if $(TARGET),-$(TARGET)) .

.PHONY: clean
clean: ## build: Remove bin/ and dist/
	rm -rf bin dist

$(GOLANGCI_BIN):
	@echo 'installing golangci-lint $(GOLANGCI) into $(@D) (once; some minutes)'
	GOBIN=$(@D) $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)

$(PROMETHEUS_BIN)/promtool: | $(PROMETHEUS_BIN)/prometheus
	cd hack/prometheus && $(GO) build -trimpath -tags remove_all_sd -ldflags '-s -w' -o $@ github.com/prometheus/prometheus/cmd/promtool

$(PROMETHEUS_BIN)/prometheus:
	@echo 'building Prometheus $(PROMETHEUS) into $(@D) (once; some minutes)'
	cd hack/prometheus && $(GO) build -trimpath -tags remove_all_sd -ldflags '-s -w' -o $@ github.com/prometheus/prometheus/cmd/prometheus
