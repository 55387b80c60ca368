# gpu-device-plugin. `make help` lists what there is. Go, gcc and make are all that a target needs beforehand, but for e2e
# (root, Debian) and image (docker); the rest it fetches at a pinned version into $(TOOLS), outside the tree.

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
TAGS    := grpcnotrace,nethttpomithttp2
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
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: kubectl-gpu ## Build bin/gpu-device-plugin, bin/gpu-node-agent and bin/kubectl-gpu, stripped
	$(GO) build -trimpath -tags $(TAGS) -ldflags '$(LDFLAGS)' -o bin/ ./cmd/...

.PHONY: kubectl-gpu
kubectl-gpu: ## Build bin/kubectl-gpu, the plugin of kubectl
	cd cmd/kubectl-gpu && $(GO) build -ldflags '$(LDFLAGS)' -o ../../bin/ .

.PHONY: cross
cross: ## Build bin/gpu-device-plugin-arm64 and bin/gpu-node-agent-arm64 with Debian's cross compiler, which it installs where it may
	hack/cross '$(LDFLAGS)' $(TAGS)

.PHONY: sbom
sbom: build ## Write dist/gpu-device-plugin.spdx.json and that of gpu-node-agent: what the programs are made of, as SPDX 2.3
	@mkdir -p dist
	@set -e; for p in gpu-device-plugin gpu-node-agent; do $(GO) run ./hack/sbom bin/$$p >dist/$$p.spdx.json; done

.PHONY: licenses
licenses: build ## Write docs/dev/licenses.md anew: the licences of all modules in the programs
	@sed '/^| module /,$$d' docs/dev/licenses.md >docs/dev/licenses.md.new
	@$(GO) run ./hack/sbom -format licenses bin/gpu-node-agent >>docs/dev/licenses.md.new
	@mv docs/dev/licenses.md.new docs/dev/licenses.md

DIST ?= dist

.PHONY: chart
chart: ## Pack the Helm chart into dist/ (DIST=folder)
	@mkdir -p $(DIST)
	tar -C deployments/helm --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=u=rwX,go=rX \
	  -czf $(DIST)/gpu-device-plugin-$(VERSION:v%=%).tgz gpu-device-plugin

.PHONY: release
release: ## Write all that a release delivers into dist/: programs, chart, images, SBOMs and checksums (Debian: apt-get; amd64)
	hack/release $(VERSION) $(IMAGE)

.PHONY: set-version
set-version: ## Write the version of the next release into the program, the chart and the manifests (TO=v0.2.0)
	@case '$(TO)' in (v[0-9]*.[0-9]*.[0-9]*) ;; (*) echo 'give the version: make set-version TO=v0.2.0'; exit 1 ;; esac
	sed -i 's/^const Number = .*/const Number = "$(TO)"/' internal/base/version/version.go
	sed -i 's/^version: .*/version: $(TO:v%=%)/; s/^appVersion: .*/appVersion: $(TO)/' deployments/helm/gpu-device-plugin/Chart.yaml
	sed -i 's#$(IMAGE):v[^ ]*#$(IMAGE):$(TO)#' deployments/*/*.yaml

# As tests are built, so that make test after it has less to compile.
.PHONY: laptop
laptop:
	@echo 'building the daemon and a stand-in kubelet (about a minute the first time)'
	@hack/progress $(GO) build -v -ldflags '-s -w' -o bin/ ./cmd/gpu-device-plugin ./test/kubelet/cmd/laptop

.PHONY: run
run: laptop ## Run the daemon on simulated GPUs with a stand-in kubelet (PROFILE=dgx-h100); Ctrl-C ends it
	@bin/laptop run --daemon bin/gpu-device-plugin --profile $(PROFILE)

.PHONY: recording
recording: laptop ## Write docs/run.svg anew: what make run shows while a GPU fails and comes back
	$(GO) run ./hack/recording bin docs/run.svg

.PHONY: demo
demo: laptop ## Tell the daemon's story in about 20 seconds: allocate, XID, cure, kubelet restart, unplug
	@bin/laptop demo --daemon bin/gpu-device-plugin --profile $(PROFILE)

.PHONY: demo-mig
demo-mig: laptop ## Show a node go from whole GPUs to MIG devices and back under running pods, in about half a minute
	@bin/laptop demo-mig --daemon bin/gpu-device-plugin --profile $(PROFILE)

# What only make test-all and the other targets need: real processes for minutes, or programs of a cluster.
LONG := bench|faults|fleet|monitoring|mps|soak

# Tests mostly wait for sockets and processes, so more of them run at a time than there are cores. make check vets.
TESTFLAGS := -vet=off -parallel 16
# So do packages. What waits the longest begins first.
PACKAGES = -p $$((2 * $$(nproc)))
FIRST := ./test/daemon ./test/mps ./test/soak

.PHONY: test
test: ## Run the tests of every package, and one story of the whole daemon (some minutes the first time)
	$(GO) test -short $(TESTFLAGS) $(PACKAGES) $$($(GO) list ./... | grep -Ev '/test/($(LONG))(/|$$)')
	cd cmd/kubectl-gpu && $(GO) test -short $(TESTFLAGS) ./...

.PHONY: test-all
test-all: ## Run all tests with the race detector, long sequences, whole daemons, MPS and a short soak
	$(GO) test -race $(TESTFLAGS) $(PACKAGES) -timeout 15m $(FIRST) ./...
	cd cmd/kubectl-gpu && $(GO) test -race $(TESTFLAGS) -timeout 15m ./...

# A number of inputs, not a duration: at the end of a duration `go test` may take its own deadline for a failure.
FUZZTIME ?= 100000x

.PHONY: fuzz
fuzz: ## Feed configuration files and requests with what nobody thought of (FUZZTIME=100000x inputs each)
	$(GO) test ./internal/config -run '^$$' -fuzz '^FuzzResolve$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/plan/dra -run '^$$' -fuzz '^FuzzParseConfig$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/kubelet/plugin -run '^$$' -fuzz '^FuzzAllocate$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/kubelet/plugin -run '^$$' -fuzz '^FuzzGetPreferredAllocation$$' -fuzztime $(FUZZTIME)
	$(GO) test ./internal/gpu/nvidia -run '^$$' -fuzz '^FuzzLibrary$$' -fuzztime 2000x

# The packages that are mutated, how many mutations of each, and the seed of the choice (make mutate prints it).
MUTATE     ?= ./internal/gpu/health ./internal/plan/resource ./internal/gpu/topology ./internal/plan/edits
MUTATIONS  ?= 60
MUTATESEED ?= $(shell date +%s)

.PHONY: mutate
mutate: ## Change the code at random places and print what its tests do not notice (MUTATE='./internal/gpu/health' MUTATIONS=60 MUTATESEED=1)
	$(GO) run ./hack/mutate -n $(MUTATIONS) -seed $(MUTATESEED) $(MUTATEFLAGS) $(MUTATE)

.PHONY: bench
bench: build ## Print the benchmark's figures beside their targets
	$(GO) run ./test/bench --daemon bin/gpu-device-plugin

.PHONY: faults
faults: build ## Inject every fault into the daemon and print what kubelet saw (4 minutes; FAULTS_FLAGS='-run TestFaults/XID' for some)
	$(GO) test ./test/faults -count=1 -v -timeout 15m -parallel 20 -daemon $(CURDIR)/bin/gpu-device-plugin $(FAULTS_FLAGS)

# How long, and the seed of what happens; 0 for another each time (it is printed).
TIME ?= 10m
SEED ?= 0

.PHONY: soak
soak: build ## Hold the daemon under random actions to what must be true (TIME=60m SEED=7); drawing and logs in dist/soak
	$(GO) run ./test/soak --daemon bin/gpu-device-plugin --time $(TIME) --seed $(SEED) --out dist/soak $(SOAK_FLAGS)

# Where make e2e leaves the API server and the etcd that it builds.
E2E_BUILT = $(or $(E2E_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-device-plugin/e2e)
KUBERNETES ?= $(E2E_BUILT)/kubernetes-1.37.0
ETCD ?= $(E2E_BUILT)/etcd-3.7.0/etcd

.PHONY: fleet
fleet: ## Start 5,000 nodes at once at a real API server and print how soon it answers; GPUs that go back from DRA; claims at a real scheduler (after make e2e; FLEET_FLAGS='-nodes 500')
	@test -x $(KUBERNETES)/kube-apiserver || { echo 'no kube-apiserver in $(KUBERNETES): run make e2e first, or set KUBERNETES'; exit 1; }
	@test -x $(ETCD) || { echo 'no etcd at $(ETCD): run make e2e first, or set ETCD'; exit 1; }
	$(GO) test ./test/fleet -count=1 -v -timeout 60m -kubernetes $(KUBERNETES) -etcd $(ETCD) $(FLEET_FLAGS)

.PHONY: e2e
e2e: e2e-devicemanager e2e-monitoring e2e-node ## Run the daemon on real kubelets (root; the first run builds Kubernetes; E2E_FLAGS='--kubelet 1.37')

MIGWISHES ?= 1000

.PHONY: mig-wishes
mig-wishes: ## Play random sequences of MIG layouts with pods, faults and kills (MIGWISHES=1000 SEED=0)
	$(GO) test ./internal/mig -count=1 -run TestRandomWishes -timeout 1h -sequences $(MIGWISHES) -seed $(SEED)

.PHONY: nightly
nightly: ## What takes too long for every change: the fault matrix, soak, long stories, older kubelets, kubelet's five minutes (90 minutes)
	@failed=; \
	 $(MAKE) --no-print-directory --keep-going nightly-node nightly-pace || failed=yes; \
	 $(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target nightly-devicemanager nightly-lead faults soak mig-wishes ptx \
	   nightly-random nightly-fleet containerd release || failed=yes; \
	 [ -z "$$failed" ]

# The parts of make nightly that are not targets of their own use. One that fails ends none of the others. Nothing runs beside the real
# nodes, whose stories depend on time; of the other parts, which wait most of the time, two run at once.
.PHONY: nightly-random nightly-lead nightly-fleet nightly-devicemanager nightly-node nightly-pace
nightly-random:
	$(GO) test -race ./internal/gpu/monitor -count=1 -run TestRandomFaults -timeout 1h -stories 50
	$(GO) test -race ./internal/kubelet/plugin -count=1 -run TestDaemonsWithDifferentLists -timeout 1h -rollouts 5
nightly-lead:
	$(GO) test ./test/daemon -count=1 -run TestOneDecides -timeout 1h -stopped 5m
nightly-fleet:
	cd cmd/kubectl-gpu && $(GO) test ./internal/command -count=1 -v -run TestFleet -fleet
nightly-devicemanager:
	test/e2e/devicemanager/run -minutes
nightly-node:
	cd test/e2e && E2E_LIMIT=7200 E2E_KEEP_GOING=yes ./run --kubelet all -long
nightly-pace:
	cd test/e2e && E2E_KEEP_GOING=yes ./run --kubelet all -long -pairs 200 -test.run 'TestClaims/pace_of_claims$$'

.PHONY: e2e-node
e2e-node: ## Run the stories on real single-node clusters (root; E2E_FLAGS='--kubelet 1.37')
	cd test/e2e && ./run $(E2E_FLAGS)

.PHONY: containerd
containerd: ## Hold what doctor makes of containerd's configuration to the loaders of containerd 1.7, 2.2 and 2.4
	$(GO) test -tags containerd -count=1 ./test/containerd

.PHONY: real
real: ## Hold the program to NVIDIA's own parts, from Debian's archive: NVML of each branch and a whole driver root (root, Debian)
	@parts=$$(test/real/parts) || { [ $$? = 3 ] && echo 'real: LEFT OUT: NVIDIA'"'"'s parts cannot be had here'; exit; }; \
	 cd test/real && $(GO) test -count=1 -timeout 10m -parts "$$parts"

.PHONY: hardware
hardware: build ## Hold the program to a real NVIDIA GPU of this machine, whose settings stay as they are (root; with containers after make e2e; 4 minutes)
	$(GO) build -o bin/client ./test/hardware/client
	$(GO) test ./test/hardware -count=1 -v -timeout 10m -daemon $(CURDIR)/bin/gpu-device-plugin -client $(CURDIR)/bin/client $(HARDWARE_FLAGS)
	$(GO) test ./test/hardware/kubelet -count=1 -v -timeout 10m -daemon $(CURDIR)/bin/gpu-device-plugin -client $(CURDIR)/bin/client \
	  -programs $(E2E_BUILT) $(HARDWARE_FLAGS)

.PHONY: ptx
ptx: ## Have the PTX assemblers of CUDA's toolkits in Debian's archive compile the kernel of validate for each architecture (Debian)
	@suites=$$(test/real/ptxas) || { [ $$? = 3 ] && echo 'ptx: LEFT OUT: CUDA'"'"'s toolkits cannot be had here'; exit; }; \
	 $(GO) test ./test/real -count=1 -v -run '^TestKernel' -ptxas "$$suites"

.PHONY: e2e-devicemanager
e2e-devicemanager: ## Hold the stand-in kubelet against kubelet's own device manager of 1.36 and 1.37 (root)
	test/e2e/devicemanager/run

.PHONY: e2e-monitoring
e2e-monitoring: build $(PROMETHEUS_BIN)/promtool ## Hold the alerts and the dashboard against a real Prometheus that scrapes a simulated node
	$(GO) test ./test/monitoring -count=1 -v -timeout 10m -daemon $(CURDIR)/bin/gpu-device-plugin -tools $(PROMETHEUS_BIN)

.PHONY: fmt
fmt: $(GOLANGCI_BIN) ## Format the code
	$(GOLANGCI_BIN) fmt ./...

.PHONY: lint
lint: check-vet check-lint check-log ## Run go vet, golangci-lint and logcheck

.PHONY: check
check: check-format check-vet check-lint check-log check-imports ## All that a change must pass besides the tests
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
	$(GO) test .

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
vulncheck: ## Look for known vulnerabilities in the code that is reached; says so where the database cannot be had (VULNDB=file:///path)
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
image: ## Build the container image with docker (DOCKER=podman for another builder, PLATFORM=linux/amd64,linux/arm64 for both, TARGET=compat)
	@command -v $(DOCKER) >/dev/null || { echo 'no $(DOCKER): apt-get install podman; make image DOCKER=podman'; exit 1; }
	$(DOCKER) build $(if $(PLATFORM),--platform $(PLATFORM)) $(if $(TARGET),--target $(TARGET)) --build-arg GO_IMAGE=$(GO_IMAGE) \
	  -t $(IMAGE):$(VERSION)$(if $(TARGET),-$(TARGET)) .

.PHONY: clean
clean: ## Remove what the build left in the tree
	rm -rf bin dist

$(GOLANGCI_BIN):
	@echo 'installing golangci-lint $(GOLANGCI) into $(@D) (once; some minutes)'
	GOBIN=$(@D) $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)

$(PROMETHEUS_BIN)/promtool: | $(PROMETHEUS_BIN)/prometheus
	cd hack/prometheus && $(GO) build -trimpath -tags remove_all_sd -ldflags '-s -w' -o $@ github.com/prometheus/prometheus/cmd/promtool

$(PROMETHEUS_BIN)/prometheus:
	@echo 'building Prometheus $(PROMETHEUS) into $(@D) (once; some minutes)'
	cd hack/prometheus && $(GO) build -trimpath -tags remove_all_sd -ldflags '-s -w' -o $@ github.com/prometheus/prometheus/cmd/prometheus
