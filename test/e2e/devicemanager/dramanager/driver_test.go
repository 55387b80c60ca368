//go:build !kubelet134 && !kubelet135

package dramanager

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc"
	"k8s.io/klog/v2"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
	daemonconfig "github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/claims"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/dra/draplugin"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/cdi"
	policy "github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/dra"
)

// The calls of a driver that a test can have fail.
const (
	reading     = "read"
	preparing   = "prepare"
	unpreparing = "unprepare"
)

// A driver is the driver with the claims of the node, in this process.
type driver struct {
	*draplugin.Plugin
	node *node
	stop func()

	mu   sync.Mutex // guards all following fields
	hook func(ctx context.Context, call, name string) error
	made map[string]int
}

// reader reads claims as the daemon does.
type reader struct{ client *kubeapi.Client }

func (r reader) Claim(ctx context.Context, namespace, name string) (policy.Claim, error) {
	found, err := r.client.ResourceClaim(ctx, namespace, name)
	if err != nil {
		return policy.Claim{}, err
	}
	claim := policy.Claim{UID: found.UID, Namespace: namespace, Name: name}
	for _, result := range found.Allocation.Results {
		if result.Driver == policy.Driver {
			claim.Results = append(claim.Results, policy.Result{
				Request: result.Request, Pool: result.Pool, Device: result.Device, ShareID: result.ShareID,
				ConsumedCapacity: result.ConsumedCapacity,
			})
		}
	}
	return claim, nil
}

// A setup is what a driver works with on a node.
type setup struct {
	dir, kubeconfig string
	pools           *feed.Feed[policy.Pool]
	snapshots       *feed.Feed[inventory.Snapshot]
}

func (s setup) claims() *claims.Claims {
	return claims.New(claims.Options{
		Inputs: claims.Inputs{Pools: s.pools, Snapshots: s.snapshots, Configs: feed.New(daemonconfig.Config{Live: daemonconfig.Live{CDI: cdi.Options{DriverRoot: "/", ContainerDriverRoot: "/"}}})},
		Files: claims.Files{StateDir: filepath.Join(s.dir, "state"), CDIDir: filepath.Join(s.dir,
			"cdi"), BootID: "one", Root: os.DirFS(filepath.Join(s.dir, "root"))},
	})
}

func (s setup) reader() reader {
	return reader{kubeapi.New(kubeapi.Options{Kubeconfig: s.kubeconfig, Node: nodeName, Version: "v1"})}
}

func (n *node) setup() setup { return setup{n.dir, n.api.Kubeconfig(), n.pools, n.snapshots} }

// startDriver starts a driver and waits until it offers itself to kubelet. It ends with the test,
// or by its stop.
func (n *node) startDriver() *driver {
	n.t.Helper()
	d := &driver{node: n, made: map[string]int{}}
	owner := n.setup().claims()
	d.Plugin = draplugin.New(draplugin.Options{
		RegistryDir: n.path("plugins_registry"), Claims: hooked{owner, d}, Reader: hookedReader{n.setup().reader(), d},
		Pools: n.pools, Snapshots: n.snapshots,
	})
	ctx, cancel := context.WithCancel(context.Background())
	var lives sync.WaitGroup
	lives.Go(func() { _ = owner.Run(ctx) })
	lives.Go(func() { _ = d.Run(ctx) })
	d.stop = sync.OnceFunc(func() {
		cancel()
		lives.Wait()
	})
	n.t.Cleanup(d.stop)
	return d
}

// startRegistered starts a driver and waits until kubelet has registered it.
func (n *node) startRegistered() *driver {
	n.t.Helper()
	d := n.startDriver()
	d.awaitRegistered(1)
	return d
}

// awaitRegistered waits until kubelet has registered the driver so often, and can call it.
func (d *driver) awaitRegistered(times int) {
	d.node.t.Helper()
	d.node.eventually(fmt.Sprintf("kubelet has registered the driver %d times", times), func() error {
		if s := d.Status().Value(); !s.Registered || s.Registrations < times {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
}

// on has a function called before each call for a claim, by the name of the claim; nil for none.
func (d *driver) on(hook func(ctx context.Context, call, name string) error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hook = hook
}

// fail has calls of one kind fail.
func (d *driver) fail(which string) {
	d.on(func(_ context.Context, call, _ string) error {
		if call == which {
			return errors.New("injected")
		}
		return nil
	})
}

func (d *driver) called(ctx context.Context, call, name string) error {
	d.mu.Lock()
	d.made[call]++
	hook := d.hook
	d.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(ctx, call, name)
}

// calls returns how many calls of a kind were made.
func (d *driver) calls(call string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.made[call]
}

type hooked struct {
	*claims.Claims
	driver *driver
}

func (h hooked) Prepare(ctx context.Context, uid string,
	read func(context.Context) (policy.Claim, error)) ([]policy.Prepared, error) {
	c, err := read(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the claim: %w", err)
	}
	if err := h.driver.called(ctx, preparing, c.Name); err != nil {
		return nil, err
	}
	return h.Claims.Prepare(ctx, uid, func(context.Context) (policy.Claim, error) { return c, nil })
}

func (h hooked) Unprepare(ctx context.Context, uid, namespace, name string) error {
	if err := h.driver.called(ctx, unpreparing, name); err != nil {
		return err
	}
	return h.Claims.Unprepare(ctx, uid, namespace, name)
}

type hookedReader struct {
	reader
	driver *driver
}

func (h hookedReader) Claim(ctx context.Context, namespace, name string) (policy.Claim, error) {
	if err := h.driver.called(ctx, reading, name); err != nil {
		return policy.Claim{}, err
	}
	return h.reader.Claim(ctx, namespace, name)
}

// processDir is the environment variable that makes the test binary a driver, for the node in a
// folder.
const processDir = "DRAMANAGER_DRIVER_DIR"

// buildDir is for programs that tests build.
var buildDir string

func TestMain(m *testing.M) {
	if dir := os.Getenv(processDir); dir != "" {
		driverProcess(dir)
		return
	}
	klog.SetLogger(klog.Logger{})       // kubelet's log is long
	_ = flag.Set("test.parallel", "24") // most tests wait most of the time; each kubelet needs an inotify instance
	var err error
	if buildDir, err = os.MkdirTemp("", "dramanager"); err != nil {
		panic(err)
	}
	code := m.Run()
	_ = os.RemoveAll(buildDir)
	os.Exit(code)
}

// driverProcess is a driver until it is killed.
func driverProcess(dir string) {
	s := setup{dir: dir, kubeconfig: filepath.Join(dir, "api", "kubeconfig")}
	snapshot, pool := machine(inventory.Health{State: inventory.Healthy})
	s.snapshots, s.pools = feed.New(snapshot), feed.New(pool)
	owner := s.claims()
	d := draplugin.New(draplugin.Options{
		RegistryDir: filepath.Join(dir, "plugins_registry"), Claims: owner, Reader: s.reader(), Pools: s.pools, Snapshots: s.snapshots,
	})
	go func() { _ = owner.Run(context.Background()) }()
	go func() { _ = d.Run(context.Background()) }()
	for {
		status, changed := d.Status().Latest()
		if status.Registered {
			fmt.Println("registered")
		}
		<-changed
	}
}

// startProcess starts a driver in a process of its own, waits until kubelet has registered it, and
// returns what kills it.
func (n *node) startProcess() (kill func()) {
	n.t.Helper()
	process := exec.Command(os.Args[0], "-test.run=^$")
	process.Env = append(os.Environ(), processDir+"="+n.dir)
	process.Stderr, process.SysProcAttr = os.Stderr, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := process.StdoutPipe()
	if err != nil {
		n.t.Fatal(err)
	}
	if err := process.Start(); err != nil {
		n.t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		_ = process.Process.Kill()
		_ = process.Wait()
	})
	n.t.Cleanup(kill)
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "registered" {
		n.t.Fatalf("the process says %q", lines.Text())
	}
	return kill
}

// otherDriver is the name of a driver of somebody else's.
const otherDriver = "other.example.com"

// other is a driver of somebody else's, which prepares claims as a test wants.
type other struct {
	registerapi.UnsafeRegistrationServer
	drav1.UnsafeDRAPluginServer
	endpoint string

	mu   sync.Mutex // guards hook
	hook func(call string) error
}

func (n *node) startOther() *other {
	n.t.Helper()
	o := &other{endpoint: n.path("plugins_registry/other-reg.sock")}
	listener, err := net.Listen("unix", o.endpoint)
	if err != nil {
		n.t.Fatal(err)
	}
	server := grpc.NewServer()
	registerapi.RegisterRegistrationServer(server, o)
	drav1.RegisterDRAPluginServer(server, o)
	go func() { _ = server.Serve(listener) }()
	n.t.Cleanup(server.Stop)
	return o
}

func (o *other) on(hook func(call string) error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.hook = hook
}

func (o *other) called(call string) string {
	o.mu.Lock()
	hook := o.hook
	o.mu.Unlock()
	if hook == nil {
		return ""
	}
	if err := hook(call); err != nil {
		return err.Error()
	}
	return ""
}

func (o *other) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{Type: registerapi.DRAPlugin, Name: otherDriver, Endpoint: o.endpoint,
		SupportedVersions: []string{drav1.DRAPluginService}}, nil
}

func (o *other) NotifyRegistrationStatus(context.Context,
	*registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	return &registerapi.RegistrationStatusResponse{}, nil
}

func (o *other) NodePrepareResources(
	_ context.Context, request *drav1.NodePrepareResourcesRequest,
) (*drav1.NodePrepareResourcesResponse, error) {
	answer := &drav1.NodePrepareResourcesResponse{Claims: map[string]*drav1.NodePrepareResourceResponse{}}
	for _, c := range request.GetClaims() {
		answer.Claims[c.GetUid()] = &drav1.NodePrepareResourceResponse{Error: o.called(preparing), Devices: []*drav1.Device{
			{PoolName: nodeName, DeviceName: "x", CdiDeviceIds: []string{otherDriver + "/device=x"}},
		}}
	}
	return answer, nil
}

func (o *other) NodeUnprepareResources(
	_ context.Context, request *drav1.NodeUnprepareResourcesRequest,
) (*drav1.NodeUnprepareResourcesResponse, error) {
	answer := &drav1.NodeUnprepareResourcesResponse{Claims: map[string]*drav1.NodeUnprepareResourceResponse{}}
	for _, c := range request.GetClaims() {
		answer.Claims[c.GetUid()] = &drav1.NodeUnprepareResourceResponse{Error: o.called(unpreparing)}
	}
	return answer, nil
}

// connected returns how many connections to sockets of the driver are open.
func (n *node) connected() (count int) {
	n.t.Helper()
	text, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line) // Num RefCount Protocol Flags Type St Inode Path
		if len(fields) == 8 && fields[5] == "03" && strings.HasPrefix(fields[7],
			n.path("plugins_registry/gpu-device-plugin-dra-")) {
			count++
		}
	}
	return count
}
