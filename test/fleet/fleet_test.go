package fleet

import (
	"bytes"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/app/daemon"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/lead"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/kubelet"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/driverchange"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/repair"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/resource"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

var (
	kubernetesDir = flag.String("kubernetes", "", "folder with kube-apiserver; without it nothing is tested")
	etcdProgram   = flag.String("etcd", "etcd", "program of etcd; with one before 3.4.25 the API server reads all slices for each list")
	nodeCount     = flag.Int("nodes", 5000, "number of nodes")
	limit         = flag.Duration("limit", 10*time.Minute, "how long the nodes may take until all are labelled")
	first         = flag.Bool("first", false, "start the nodes without a state directory: they do not know how many they are")
)

const (
	etcdURL, etcdPeer = "http://127.0.0.1:23979", "http://127.0.0.1:23980"
	apiPort           = "16443"
	adminToken        = "admin"
	nodeToken         = "node"
	// account is whom the nodes' requests come from, so that the API server treats them as those of
	// the chart's service account.
	account = "system:serviceaccount:kube-system:gpu-device-plugin"
	// wanted is what 99 of 100 answers are to take at most.
	wanted = time.Second
)

func TestFleet(t *testing.T) {
	if *kubernetesDir == "" {
		t.Skip("needs -kubernetes: see make fleet")
	}
	admin, processes := startAPIServer(t)
	createNodes(t, admin)
	kubeconfigs := make([]string, *nodeCount)
	for i := range kubeconfigs {
		kubeconfigs[i] = nodeFiles(t, i)
	}

	f := fleet{admin: admin, processes: processes, kubeconfigs: kubeconfigs}
	f.start(t, "labelled and with the condition", "second boot", func(seen *counters) int {
		return int(min(seen.labelled.Load(), seen.told.Load()))
	})
	// The labels and the condition are still there.
	f.start(t, "watched after a further restart", "third boot",
		func(seen *counters) int { return int(seen.watched.Load()) })
}

// A fleet is nodes, and the programs that answer them.
type fleet struct {
	admin       *kubernetes.Clientset
	processes   []process
	kubeconfigs []string
}

// start starts all nodes at once, waits until each is what it is to be, ends them, and prints how
// the API server answered. count returns how many are.
func (f fleet) start(t *testing.T, what, boot string, count func(*counters) int) {
	t.Helper()
	t.Logf("load: %s", load(t))
	before := scrape(t)
	var seen counters
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	end := sync.OnceFunc(func() { cancel(); running.Wait() })
	t.Cleanup(end)
	var others bystander
	running.Go(func() { others.ask(ctx, f.admin) })
	used := make([]time.Duration, len(f.processes))
	for i, p := range f.processes {
		used[i] = cpuTime(t, p.pid)
	}
	start := time.Now()
	for i, kubeconfig := range f.kubeconfigs {
		running.Go(func() { runNode(ctx, kubeconfig, nodeName(i), boot, &seen) })
	}
	for time.Since(start) < *limit && count(&seen) < *nodeCount {
		select {
		case <-time.After(2 * time.Second):
		case <-t.Context().Done():
			t.Fatal("interrupted")
		}
	}
	took := time.Since(start)
	after := scrape(t)
	t.Logf("%d nodes %s %v after they started at once; load: %s", count(&seen), what, took.Round(time.Second), load(t))
	for i, p := range f.processes {
		cpu := cpuTime(t, p.pid) - used[i]
		t.Logf("%s used %v of CPU time, %v a node", p.name, cpu.Round(time.Second),
			(cpu / time.Duration(*nodeCount)).Round(100*time.Microsecond))
	}
	end()
	t.Log(&others)
	t.Logf("requests of the nodes, by verb, resource and answer: %s", seen.String())
	if count(&seen) < *nodeCount {
		t.Errorf("some of %d nodes are not %s after %v", *nodeCount, what, *limit)
	}
	for _, h := range []struct{ what, metric string }{
		{"answers", "apiserver_request_duration_seconds"},
		{"waits for its turn", "apiserver_flowcontrol_request_wait_duration_seconds"},
		{"answers to LIST", "apiserver_request_duration_seconds LIST"},
		{"answers to PATCH", "apiserver_request_duration_seconds PATCH"},
		{"answers to APPLY", "apiserver_request_duration_seconds APPLY"},
	} {
		d := after[h.metric].since(before[h.metric])
		t.Logf("%s of the API server: %d, p50 %v, p99 %v", h.what, d.count(), d.quantile(0.5), d.quantile(0.99))
		if p99 := d.quantile(0.99); p99 > wanted {
			t.Errorf("p99 of %s is %v, want %v", h.what, p99, wanted)
		}
	}
}

// counters are of what the nodes have done. To ask the API server for that would be a load of its
// own.
type counters struct {
	labelled, told, watched atomic.Int64 // nodes whose labels and condition were written, and that watch, once each

	mu       sync.Mutex // guards requests
	requests map[string]int
}

func (c *counters) count(verb, resource string, code int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.requests == nil {
		c.requests = map[string]int{}
	}
	c.requests[fmt.Sprintf("%s %s %d", verb, resource, code)]++
}

// String returns the requests. A request without an answer has the code 0.
func (c *counters) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var text []string
	for _, kind := range slices.Sorted(maps.Keys(c.requests)) {
		text = append(text, fmt.Sprintf("%s: %d", kind, c.requests[kind]))
	}
	return strings.Join(text, ", ")
}

// nodeFiles writes the kubeconfig of a node, and beside it what a process left there before all
// nodes were restarted. It returns the path of the kubeconfig.
func nodeFiles(t *testing.T, i int) string {
	t.Helper()
	kubeconfig := writeKubeconfig(t, nodeToken, nodeName(i))
	left := fmt.Sprintf(`{"version": 1, "nodes": %d, "boot": "first boot"}`, *nodeCount)
	if err := os.WriteFile(filepath.Join(filepath.Dir(kubeconfig), "cluster.json"), []byte(left), 0o600); err != nil {
		t.Fatal(err)
	}
	return kubeconfig
}

func nodeName(i int) string { return fmt.Sprintf("node-%05d", i) }

// runNode does what gpu-node-agent does with the API server, for a node that has this boot ID.
func runNode(ctx context.Context, kubeconfig, name, boot string, seen *counters) {
	c := config.Config{
		Startup: config.Startup{Kubeconfig: kubeconfig, NodeName: name},
		Live: config.Live{Features: config.Features{
			Labels: config.LabelsNode, Events: true, Condition: true, Taint: true,
		}},
	}
	if !*first {
		c.StateDir = filepath.Dir(kubeconfig)
	}
	d := viewOf(c, func(verb, resource string, code int) {
		seen.count(verb, resource, code)
		switch {
		case code != http.StatusOK:
		case verb == http.MethodPatch && resource == "nodes":
			seen.labelled.Add(1)
		case verb == http.MethodPatch && resource == "nodes/status":
			seen.told.Add(1)
		case verb == "WATCH":
			seen.watched.Add(1)
		}
	})
	own := cluster.New(cluster.Options{})
	own.Choose(ctx, c.Startup)
	var tasks sync.WaitGroup
	for _, task := range append(own.Observation(d.Configs, boot), own.Outputs(d)...) {
		tasks.Go(func() { _ = task.Run(ctx) }) // they end with ctx
	}
	tasks.Wait()
}

// viewOf returns what gpu-node-agent knows of a node with eight healthy GPUs. Each request is counted.
func viewOf(c config.Config, counted func(verb, resource string, code int)) daemon.View {
	var gpus []status.Device
	for i := range 8 {
		gpus = append(gpus, status.Device{Index: fmt.Sprint(i), UUID: fmt.Sprintf("GPU-%s-%d", c.NodeName, i), State: "Healthy"})
	}
	return daemon.View{
		ShrinkView: daemon.ShrinkView{PendingShrink: feed.New(uint64(0)), ApproveShrink: func(uint64) {},
			Listed: func() map[string]int { return nil }},
		ConfigView: daemon.ConfigView{Startup: c.Startup, Configs: feed.New(c), ConfigErrors: feed.New[error](nil)},
		Snapshots:  feed.New(inventory.Snapshot{}),
		LabelView:  daemon.LabelView{Labels: feed.New(labels()), LabelsProblem: feed.New[error](nil)},
		Offered:    feed.New(resource.Plan{}),
		MaintenanceView: daemon.MaintenanceView{Repairs: feed.New(repair.Status{}),
			DriverChange: feed.New(driverchange.Status{})},
		Lead: lead.New(lead.Options{}),
		Status: func(context.Context) (status.Status, error) {
			return status.Status{Version: "v1", Driver: "580", Looked: time.Now(), GPUs: gpus}, nil
		},
		AccountView: daemon.AccountView{Held: func(context.Context) ([]kubelet.HeldDevice, error) { return nil, nil }},
		CountView:   daemon.CountView{APIRequested: counted, EventDropped: func(string) {}},
	}
}

// labels are as many as a node with whole GPUs gets.
func labels() map[string]string {
	set := map[string]string{"nvidia.com/gpu.present": "true", "gpu-device-plugin.github.io/gpu.health": "healthy"}
	for _, suffix := range []string{
		"count", "product", "memory", "family", "compute.major", "compute.minor", "replicas", "sharing-strategy", "machine", "mode",
		"multiprocessors", "slices.gi", "slices.ci", "engines.copy", "engines.decoder", "engines.encoder", "engines.jpeg", "engines.ofa",
	} {
		set["nvidia.com/gpu."+suffix] = "NVIDIA-H100-80GB-HBM3"
	}
	return set
}

// createNodes makes the nodes, each as large as one with twenty images and kubelet's labels, and
// gives their account its rights.
func createNodes(t *testing.T, admin *kubernetes.Clientset) {
	t.Helper()
	grant(t, admin)
	start := time.Now()
	each(t, *nodeCount, func(i int) error {
		name := nodeName(i)
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name,
			Labels: map[string]string{"kubernetes.io/hostname": name}}}
		for i := range 20 {
			n.Status.Images = append(n.Status.Images, corev1.ContainerImage{SizeBytes: int64(i), Names: []string{
				fmt.Sprintf("registry.example/some/longer/path/image-%d@sha256:%064d", i, i),
			}})
		}
		_, err := admin.CoreV1().Nodes().Create(t.Context(), n, metav1.CreateOptions{})
		return err
	})
	t.Logf("%d nodes created in %v", *nodeCount, time.Since(start).Round(time.Second))
}

// each calls do with each number below count, some at a time.
func each(t *testing.T, count int, do func(i int) error) {
	t.Helper()
	var next atomic.Int64
	var workers sync.WaitGroup
	var failed atomic.Pointer[error]
	for range 16 {
		workers.Go(func() {
			for i := next.Add(1) - 1; i < int64(count); i = next.Add(1) - 1 {
				if err := do(int(i)); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	workers.Wait()
	if err := failed.Load(); err != nil {
		t.Fatal(*err)
	}
}

// startAPIServer starts etcd and the API server, which end with the test, and returns a client with
// all rights.
func startAPIServer(t *testing.T) (*kubernetes.Clientset, []process) {
	t.Helper()
	dir := t.TempDir()
	tokens := filepath.Join(dir, "tokens.csv")
	text := adminToken + ",admin,admin,system:masters\n" + nodeToken + "," + account + ",node,\"system:serviceaccounts\"\n"
	if err := os.WriteFile(tokens, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	key := filepath.Join(dir, "key.pem")
	command(t, "openssl", "genrsa", "-out", key, "2048")
	etcd := run(t, *etcdProgram, "--data-dir", filepath.Join(dir, "etcd"), "--listen-client-urls", etcdURL,
		"--advertise-client-urls", etcdURL,
		"--listen-peer-urls", etcdPeer, "--log-level", "error")
	server := run(t, filepath.Join(*kubernetesDir, "kube-apiserver"), "--etcd-servers="+etcdURL,
		"--bind-address=127.0.0.1", "--secure-port="+apiPort,
		"--cert-dir="+filepath.Join(dir, "certificates"), "--endpoint-reconciler-type=none", "--allow-privileged",
		"--token-auth-file="+tokens, "--authorization-mode=RBAC",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+
			key, "--service-account-signing-key-file="+key)

	c, err := clientcmd.BuildConfigFromFlags("", writeKubeconfig(t, adminToken, "admin"))
	if err != nil {
		t.Fatal(err)
	}
	c.QPS, c.Burst = 1000, 1000
	admin, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	ready := func() error { return admin.CoreV1().RESTClient().Get().AbsPath("/readyz").Do(t.Context()).Error() }
	for late := time.After(2 * time.Minute); ready() != nil; {
		select {
		case <-time.After(200 * time.Millisecond):
		case <-late:
			t.Fatalf("the API server is not ready: %v", ready())
		}
	}
	return admin, []process{etcd, server, {name: "the nodes", pid: os.Getpid()}}
}

// A process is a program that runs.
type process struct {
	name string
	pid  int
	log  string // path of what it prints; empty for this process
	end  func() // kills it, and returns when it has ended; nil for this process
}

// run starts a program that ends with the test.
func run(t *testing.T, name string, args ...string) process {
	t.Helper()
	log, err := os.Create(filepath.Join(t.TempDir(), filepath.Base(name)+".log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = log.Close()
	})
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the log of %s ends with:\n%s", name, text[max(0, len(text)-4000):])
		}
		end()
	})
	return process{filepath.Base(name), cmd.Process.Pid, log.Name(), end}
}

func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
}

// writeKubeconfig writes how the API server is reached with a token, and returns the path. Each has
// another name of the server, as client-go would give those that are alike one pool of connections,
// of which it keeps 25: each node would begin connections without end.
func writeKubeconfig(t *testing.T, token, server string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: "https://127.0.0.1:%s", insecure-skip-tls-verify: true,
tls-server-name: %s}}], users: [{name: u, user: {token: %q}}]}`, apiPort, server, token)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// scrape returns the histograms of the API server's metrics, without watches.
func scrape(t *testing.T) map[string]histogram {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://127.0.0.1:"+apiPort+"/metrics",
		http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+adminToken)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	answer, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return histograms(bytes.NewReader(text))
}
