package hardware_test

import (
	"context"
	"errors"
	"flag"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/control"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/hardware"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/node"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

var (
	daemonFlag = flag.String("daemon", "", "path of the daemon's binary; without it all tests are left out")
	clientFlag = flag.String("client", "", "path of the program of the folder client; built with go build if empty")
)

const resource = "nvidia.com/gpu"

var built string // the folder of the client that was built

func TestMain(m *testing.M) {
	flag.Parse()
	code := m.Run()
	if built != "" {
		_ = os.RemoveAll(built)
	}
	os.Exit(code)
}

// client returns the path of the client.
var client = sync.OnceValues(func() (string, error) {
	if *clientFlag != "" {
		return filepath.Abs(*clientFlag)
	}
	var err error
	if built, err = os.MkdirTemp("", "client"); err != nil {
		return "", err
	}
	path := filepath.Join(built, "client")
	if out, err := exec.Command("go", "build", "-o", path, "./client").CombinedOutput(); err != nil {
		return "", errors.New(string(out))
	}
	return path, nil
})

// needGPU leaves a test out where there is nothing to try.
func needGPU(t *testing.T) {
	t.Helper()
	hardware.NeedGPU(t, *daemonFlag)
}

// A machine has the daemon and a stand-in kubelet, and real GPUs.
type machine struct {
	*testing.T
	*node.Node

	at string // where metrics are, if they are wanted
}

// start starts the daemon and waits until kubelet knows its GPUs as healthy.
func start(t *testing.T, args ...string) *machine {
	t.Helper()
	needGPU(t)
	m := open(t, node.Setup{Daemon: *daemonFlag, Args: args})
	m.run()
	return m
}

// measured is start with metrics.
func measured(t *testing.T, args ...string) *machine {
	t.Helper()
	needGPU(t)
	m := open(t, node.Setup{Daemon: *daemonFlag, Args: args})
	m.measure()
	m.run()
	return m
}

// measure has the daemon serve metrics.
func (m *machine) measure() {
	m.Helper()
	var err error
	if m.at, err = loopback.Free(m.Context()); err != nil {
		m.Fatal(err)
	}
	m.Args = append(m.Args, "--metrics-address", m.at)
}

// open makes room for a daemon, and ends it with the test.
func open(t *testing.T, setup node.Setup) *machine {
	t.Helper()
	n, err := node.Open(setup)
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{T: t, Node: n}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the daemon's log:\n%s", n.Logged())
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// run starts the daemon's process and waits as start does.
func (m *machine) run() {
	m.Helper()
	if err := m.StartDaemon(); err != nil {
		m.Fatal(err)
	}
	poll.Until(m, "kubelet knows healthy GPUs, and no others", func() bool {
		select {
		case <-m.Running().Ended():
			m.Fatalf("the daemon ended: %v", m.Running().Err())
		default:
		}
		return m.Allocatable(resource) > 0 && m.Allocatable(resource) == m.Capacity(resource)
	})
}

// call makes a call at the daemon's control socket.
func (m *machine) call(name string, arguments, result any) {
	m.Helper()
	if err := control.Call(m.Context(), m.ControlSocket(), name, arguments, result); err != nil {
		m.Fatalf("%s: %v", name, err)
	}
}

func (m *machine) status() (s status.Status) {
	m.Helper()
	m.call(daemon.CallStatus, nil, &s)
	return s
}

// gpu returns the UUID of the GPU that programs are to use: the first one.
func (m *machine) gpu() string {
	m.Helper()
	return m.status().GPUs[0].UUID
}

// stayedHealthy fails the test if kubelet was told since a mark that a device is not Healthy.
func (m *machine) stayedHealthy(mark int) {
	m.Helper()
	for _, e := range m.Events(mark) {
		for _, d := range e.Devices {
			if d.Health != "Healthy" {
				m.Errorf("kubelet was told that %s is %s", d.ID, d.Health)
			}
		}
	}
	for _, g := range m.status().GPUs {
		if g.State != "Healthy" {
			m.Errorf("GPU %s is %s: %s", g.Index, g.State, g.Reason)
		}
	}
}

// series are the metrics of one scrape.
type series []string

// scrape asks for metrics once.
func (m *machine) scrape() series {
	m.Helper()
	text, err := get(m.Context(), "http://"+m.at+"/metrics")
	if err != nil {
		m.Fatal(err)
	}
	return strings.Split(text, "\n")
}

func get(ctx context.Context, url string) (string, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return "", err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	return string(text), err
}

// value returns the value of the first series with a name and all of the labels, each such as
// `xid="31"`.
func (s series) value(name string, labels ...string) (float64, bool) {
lines:
	for _, line := range s {
		head, value, _ := strings.Cut(line, "} ")
		if before, after, bare := strings.Cut(line, " "); bare && !strings.Contains(before, "{") {
			head, value = before, after
		}
		if found, _, _ := strings.Cut(head, "{"); found != name {
			continue
		}
		for _, l := range labels {
			if !strings.Contains(head, l) {
				continue lines
			}
		}
		v, err := strconv.ParseFloat(value, 64)
		return v, err == nil
	}
	return 0, false
}
