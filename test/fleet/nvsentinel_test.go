package fleet

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/healthevents"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/nvsentinel"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

// A connector is NVSentinel's own platform connector for the node nvsentinel.Node, one process after
// the other. It writes its files and its socket into a folder.
type connector struct {
	t          *testing.T
	folder     string
	kubeconfig string
	process    process // the present one, which may have ended
}

// nvsentinelNames are the namespace and the account of the connector in NVSentinel's chart.
const (
	nvsentinelSpace   = "nvsentinel"
	nvsentinelAccount = "platform-connectors"
)

// connectorConfig is the configuration of a connector that writes nothing to the API server.
const connectorConfig = `{"enableNodeBindingAuth": "true", "AuthAudience": "none", "AuthCrossNodeServiceAccounts": [],
	"pipeline": [{"name": "Deduplicator", "enabled": false, "config": "none"}]}`

// socket returns the path of the connector's socket.
func (c *connector) socket() string { return filepath.Join(c.folder, "nvsentinel.sock") }

// Start implements nvsentinel.Process.
func (c *connector) Start() {
	c.t.Helper()
	c.Kill()
	address, err := loopback.Free(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		c.t.Fatal(err)
	}
	c.process = run(c.t, "env", "NODE_NAME="+nvsentinel.Node, filepath.Join(*nvsentinelDir, "bin/platform-connectors"),
		"--socket="+c.socket(), "--config="+filepath.Join(c.folder, "config.json"), "--kubeconfig="+c.kubeconfig,
		"--metrics-port="+port, "--tls-enabled=false")
	poll.Within(c.t, soon, "the connector listens to calls and to signals", func() bool {
		log := c.logged()
		return bytes.Contains(log, []byte("gRPC server socket created")) && bytes.Contains(log, []byte("Waiting for SIGINT"))
	})
}

// Kill implements nvsentinel.Process.
func (c *connector) Kill() {
	if c.process.end != nil {
		c.process.end()
	}
}

// Stop implements nvsentinel.Process.
func (c *connector) Stop() {
	c.t.Helper()
	if err := syscall.Kill(c.process.pid, syscall.SIGTERM); err != nil {
		c.t.Fatal(err)
	}
	poll.Within(c.t, soon, "the connector removes its socket", func() bool { return !exists(c.socket()) })
	c.Kill()
}

// Received implements nvsentinel.Process.
func (c *connector) Received() []string { return nvsentinel.Logged(c.t, c.logged()) }

// gets waits until the present process has received so many events, by their words before the GPU, and
// no others.
func (c *connector) gets(want map[string]int) {
	c.t.Helper()
	total := 0
	for _, n := range want {
		total += n
	}
	poll.Within(c.t, soon, fmt.Sprintf("the connector has %d events", total), func() bool {
		return len(c.Received()) >= total
	})
	got := map[string]int{}
	for _, e := range c.Received() {
		words, gpu, _ := strings.Cut(e, " GPU_UUID=GPU-")
		if got[words]++; !strings.Contains(gpu, " PCI=0000:") || strings.Count(gpu, " ") != 1 {
			c.t.Errorf("the event %q", e)
		}
	}
	if !maps.Equal(got, want) {
		c.t.Fatalf("the connector has the events %v, want %v", got, want)
	}
}

// logged returns what the present process has printed.
func (c *connector) logged() []byte {
	c.t.Helper()
	text, err := os.ReadFile(c.process.log)
	if err != nil {
		c.t.Fatal(err)
	}
	return text
}

// writeFile writes a file of the connector.
func (c *connector) writeFile(name, text string) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.folder, name), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// TestRecipeStandIns holds NVSentinel's own platform connector to the cases of its stand-in.
func TestRecipeStandIns(t *testing.T) {
	if *nvsentinelDir == "" {
		t.Skip("needs -nvsentinel: see make recipes")
	}
	c := &connector{t: t, folder: loopback.Folder(t), kubeconfig: writeKubeconfig(t, "none", "none")}
	c.writeFile("config.json", connectorConfig)
	nvsentinel.Check(t, c.socket(), c)
}

// TestRecipeOfNVSentinel has NVSentinel's own platform connector, with the configuration and the rights
// of its chart, receive the events of a node. Events that are only to be stored change nothing in the
// cluster; the others become a condition of the Node. Neither a restart of the agent nor one of the
// connector loses an event, and only a new connector gets one again.
func TestRecipeOfNVSentinel(t *testing.T) {
	if *nvsentinelDir == "" {
		t.Skip("needs -nvsentinel: see make recipes")
	}
	const (
		name                = nvsentinel.Node
		stored, storedFault = "store healthy", "store action 5 XID 54"
		recovered, fault    = "execute healthy", "execute action 5 XID 54"
	)
	c := openRecipe(t, "nvsentinel")
	c.createNode(name)
	sentinel := c.installConnector()
	sentinel.Start()
	c.startNode(name, "--health-events=unix://"+sentinel.socket())
	// faults waits until the condition of the connector has the faults of so many GPUs.
	faults := func(status corev1.ConditionStatus, want int) corev1.NodeCondition {
		t.Helper()
		var is corev1.NodeCondition
		poll.Within(t, soon, fmt.Sprintf("the condition of the connector has %d faults", want), func() bool {
			is = c.connectorCondition(name)
			return is.Status == status && strings.Count(is.Message, "GPU_UUID:") == want
		})
		t.Logf("%s of %s is %s: %s: %s", is.Type, name, is.Status, is.Reason, is.Message)
		if want != strings.Count(is.Message, "ErrorCode:54 GPU_UUID:GPU-") ||
			want != strings.Count(is.Message, " Recommended Action=CONTACT_SUPPORT;") {
			t.Errorf("the condition is %+v", is)
		}
		return is
	}

	c.simulate(name, "xid", "--gpu", "3", "--xid", "54")
	sentinel.gets(map[string]int{stored: 7, storedFault: 1})
	poll.Within(t, soon, "the connector has looked at all events", func() bool {
		return bytes.Count(sentinel.logged(), []byte("Skipping non-remediation health event")) == 8
	})
	if is := c.connectorCondition(name); is.Type != "" {
		t.Errorf("events that are only to be stored lead to the condition %+v", is)
	}

	// The agent restarts and lets NVSentinel act, and is then killed.
	agent := c.nodes[name]
	agent.Args = append(agent.Args, "--health-events-strategy=executeRemediation")
	if err := agent.StopDaemon(); err != nil {
		t.Fatal(err)
	}
	c.startDaemon(name)
	sentinel.gets(map[string]int{stored: 7, storedFault: 1, fault: 1})
	faults(corev1.ConditionTrue, 1)
	poll.Within(t, soon, "the answers are on disk", func() bool { // else the event is sent again, unchanged
		text, err := os.ReadFile(filepath.Join(agent.Path("state"), healthevents.File))
		return err == nil && strings.Count(strings.ReplaceAll(string(text), " ", ""), `"accepted":true`) == 8
	})
	killed := agent.Running()
	if err := killed.Kill(); err != nil {
		t.Fatal(err)
	}
	<-killed.Ended()
	c.startDaemon(name)
	c.simulate(name, "xid", "--gpu", "5", "--xid", "54")
	sentinel.gets(map[string]int{stored: 7, storedFault: 1, fault: 2})
	before := faults(corev1.ConditionTrue, 2)

	// A new connector gets the last event of each GPU again, and its condition stays as it is.
	sentinel.Start()
	sentinel.gets(map[string]int{stored: 6, fault: 2})
	c.mend(name, "5")
	sentinel.gets(map[string]int{stored: 6, fault: 2, recovered: 1})
	after := faults(corev1.ConditionTrue, 1)
	if !after.LastTransitionTime.Equal(&before.LastTransitionTime) || !strings.Contains(before.Message, after.Message) {
		t.Errorf("the condition was %+v and is %+v", before, after)
	}

	// A connector accepts events that it cannot write. The next one writes them.
	works := sentinel.kubeconfig
	sentinel.kubeconfig = filepath.Join(sentinel.folder, "unreachable")
	sentinel.writeFile("unreachable", fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: "https://%s"}}]}`, c.freeAddress()))
	sentinel.Stop()
	sentinel.Start()
	sentinel.gets(map[string]int{stored: 6, recovered: 1, fault: 1})
	c.mend(name, "3")
	sentinel.gets(map[string]int{stored: 6, recovered: 2, fault: 1})
	poll.Within(t, soon, "the connector gives up twice", func() bool {
		return bytes.Count(sentinel.logged(), []byte("Not able to process healthEvent")) == 2
	})
	faults(corev1.ConditionTrue, 1)
	sentinel.kubeconfig = works
	sentinel.Start()
	sentinel.gets(map[string]int{stored: 6, recovered: 2})
	if is := faults(corev1.ConditionFalse, 0); is.Message != "No Health Failures" {
		t.Errorf("the condition is %+v", is)
	}

	events, err := c.admin.CoreV1().Events(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(events.Items, func(e corev1.Event) bool { return strings.HasPrefix(e.Reason, "GpuDevicePlugin") }); i >= 0 {
		t.Errorf("the connector wrote the Event %+v", events.Items[i])
	}
}

// installConnector applies what NVSentinel's chart has for its platform connector, without a database,
// and returns a connector with that configuration and account.
func (c *recipeCluster) installConnector() *connector {
	c.t.Helper()
	args := []string{"template", "nvsentinel", filepath.Join(*nvsentinelDir, "distros/kubernetes/nvsentinel"),
		"--namespace", nvsentinelSpace}
	for _, part := range []string{"configmap", "serviceaccount", "clusterrole", "clusterrolebinding"} {
		args = append(args, "--show-only", "templates/"+part+".yaml")
	}
	manifest, err := exec.CommandContext(c.t.Context(), *helmProgram, args...).Output()
	if err != nil {
		c.t.Fatalf("helm template: %v", err)
	}
	c.kubectl("", "create", "namespace", nvsentinelSpace)
	c.kubectl(string(manifest), "create", "--namespace", nvsentinelSpace, "-f", "-")
	config, err := c.admin.CoreV1().ConfigMaps(nvsentinelSpace).Get(c.t.Context(), nvsentinelAccount, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	token := accountToken(c.t, c.admin, nvsentinelSpace, nvsentinelAccount, nil)
	found := &connector{t: c.t, folder: loopback.Folder(c.t), kubeconfig: writeKubeconfig(c.t, token, "nvsentinel")}
	for name, text := range config.Data {
		found.writeFile(name, strings.ReplaceAll(text, "/etc/config", found.folder))
	}
	return found
}

// connectorCondition returns the condition of NVSentinel's connector for this agent, which may be empty.
func (c *recipeCluster) connectorCondition(name string) corev1.NodeCondition {
	c.t.Helper()
	for _, is := range c.node(name).Status.Conditions {
		if is.Type == "GpuDevicePluginHealth" {
			return is
		}
	}
	return corev1.NodeCondition{}
}

// mend makes a GPU of a node healthy, whether the present process of the daemon simulated its fault or
// an earlier one recorded it.
func (c *recipeCluster) mend(name, gpu string) {
	c.t.Helper()
	c.simulate(name, "restore", "--gpu", gpu)
	if err := c.nodes[name].Do(c.t.Context(), "health", "clear", "--gpu", gpu); err != nil {
		c.t.Fatal(err)
	}
}

// startDaemon starts the daemon of a node again.
func (c *recipeCluster) startDaemon(name string) {
	c.t.Helper()
	if err := c.nodes[name].StartDaemon(); err != nil {
		c.t.Fatal(err)
	}
}
