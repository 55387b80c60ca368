package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/e2e/node"
)

// oneGPU is a claim on one GPU.
var oneGPU = resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{
	{Name: "gpu", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "gpu.nvidia.com"}},
}}}

// template is the name of a ResourceClaimTemplate with that claim.
const template = "one-gpu"

// stubborn returns a pod with a claim of a template, whose container goes on for two seconds when
// it is to end.
func stubborn(name, template string) *corev1.Pod {
	pod := podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(template)})
	pod.Spec.TerminationGracePeriodSeconds = ptr.To(int64(2))
	pod.Spec.Containers[0].Command = []string{"busybox", "sh", "-c", "trap '' TERM; while :; do busybox sleep 1; done",
		marker}
	return pod
}

// podWith returns a pod with a claim.
func podWith(name string, claim corev1.PodResourceClaim) *corev1.Pod {
	claim.Name = "gpu"
	pod := podOf(name, gpu, 1)
	pod.Spec.ResourceClaims = []corev1.PodResourceClaim{claim}
	pod.Spec.Containers[0].Resources = corev1.ResourceRequirements{Claims: []corev1.ResourceClaim{{Name: claim.Name}}}
	return pod
}

// makeTemplate makes a ResourceClaimTemplate until the test ends.
func makeTemplate(ctx context.Context, t *testing.T, n *node.Node, name string, spec resourceapi.ResourceClaimSpec) {
	t.Helper()
	templates := n.Client.ResourceV1().ResourceClaimTemplates(corev1.NamespaceDefault)
	object := &resourceapi.ResourceClaimTemplate{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourceapi.ResourceClaimTemplateSpec{Spec: spec},
	}
	if _, err := templates.Create(ctx, object, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = templates.Delete(context.Background(), name, metav1.DeleteOptions{}) })
}

// resourceAPIs counts requests to an API server that seems to serve one version of resource.k8s.io
// alone.
type resourceAPIs struct {
	mu       sync.Mutex
	requests map[string]int // by version
}

// serveOnly starts a proxy before the API server which hides other versions of resource.k8s.io than
// this one from the daemon. The scheduler and kubelet, which know v1 alone, are not behind it.
func serveOnly(t *testing.T, version string) *resourceAPIs {
	t.Helper()
	const group = "/apis/resource.k8s.io/"
	a := &resourceAPIs{requests: map[string]int{}}
	certificate, err := tls.LoadX509KeyPair("/run/kube-apiserver/apiserver.crt", "/run/kube-apiserver/apiserver.key")
	if err != nil {
		t.Fatal(err)
	}
	pass := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: apiServerAddress})
	pass.FlushInterval = -1
	pass.Transport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	server := &http.Server{
		Addr: proxyAddress, TLSConfig: &tls.Config{Certificates: []tls.Certificate{certificate}}, ReadHeaderTimeout: stepLimit,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if rest, is := strings.CutPrefix(r.URL.Path, group); is {
				asked, _, _ := strings.Cut(rest, "/")
				a.mu.Lock()
				a.requests[asked]++
				a.mu.Unlock()
				if asked != version {
					http.Error(w, "404 page not found", http.StatusNotFound)
					return
				}
			}
			pass.ServeHTTP(w, r)
		}),
	}
	var running sync.WaitGroup
	running.Go(func() {
		if err := server.ListenAndServeTLS("", ""); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("the proxy ended: %v", err)
		}
	})
	t.Cleanup(func() {
		_ = server.Close()
		running.Wait()
	})
	return a
}

// claimsByOlderAPI: where the API server serves the daemon resource.k8s.io/v1beta1 alone, slices
// are published by it and claims in its form get their GPUs: with default gates, and with taints of
// devices and partitionable devices off. An ill GPU has a taint, or is in no slice.
func claimsByOlderAPI(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	restart := func(args ...string) {
		t.Helper()
		n.StopAPIServer()
		if err := n.StartAPIServer(ctx, args...); err != nil {
			t.Fatal(err)
		}
	}
	const older = "--runtime-config=resource.k8s.io/v1beta1=true"
	restart(older)
	apis := serveOnly(t, "v1beta1")
	t.Cleanup(func() {
		n.StopAPIServer()
		if err := n.StartAPIServer(context.Background()); err != nil {
			t.Error(err)
		}
	})
	held := changeToClaims(ctx, t, n)
	kubectl(ctx, t, n, "apply", "--validate=strict", "--filename",
		filepath.Join(*source, "test/e2e/testdata/claim-v1beta1.yaml"))
	t.Cleanup(func() {
		_, _ = n.Kubectl(context.Background(), "delete", "resourceclaimtemplate", "single-gpu-v1beta1")
	})
	for _, gates := range []string{"default gates", "gates off"} {
		published := gpus - 2
		if gates == "gates off" {
			restart(older, "--feature-gates=DRADeviceTaints=false,DRADeviceTaintRules=false,DRAPartitionableDevices=false")
			waitDevices(ctx, t, n, gpus-2)
			published--
		}
		name := "older-" + strings.Fields(gates)[0]
		start := time.Now()
		startPod(ctx, t, n, podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To("single-gpu-v1beta1")}))
		before := waitPod(ctx, t, n, name, isRunning)
		phase("a pod by v1beta1 runs, "+gates, start)
		got := nodesIn(ctx, t, n, name)
		if len(got) != 1 || slices.Contains(held, got[0]) {
			t.Errorf("%s: the pod has %v, another one has %v", gates, got, held)
		}
		all := simulatedGPUs(ctx, t, n)
		ill := slices.IndexFunc(all, func(g simulated) bool {
			return !slices.Contains(append(slices.Clone(held), got...), filepath.Base(g.node()))
		})
		daemonExec(ctx, t, n, "simulate", "xid", "--gpu", all[ill].UUID, "--xid", "48")
		waitDevices(ctx, t, n, gpus-3)
		if found := len(devicesOf(ctx, t, n)); found != published {
			t.Errorf("%s: %d devices in slices, want %d", gates, found, published)
		}
		daemonExec(ctx, t, n, "simulate", "restore", "--gpu", all[ill].UUID)
		waitDevices(ctx, t, n, gpus-2)
		if err := isSame(before)(getPod(ctx, t, n, name)); err != nil {
			t.Error(err)
		}
		deletePod(ctx, t, n, name)
	}
	wait(ctx, t, func(context.Context) error { return prepared(0) })
	apis.mu.Lock()
	defer apis.mu.Unlock()
	t.Logf("requests by version: %v", apis.requests)
	if apis.requests["v1beta1"] == 0 || apis.requests["v1"] == 0 {
		t.Error("the daemon did not ask for v1 and then use v1beta1")
	}
}

// devicesOf returns the devices in slices, each with its taints.
func devicesOf(ctx context.Context, t *testing.T, n *node.Node) (devices []resourceapi.Device) {
	t.Helper()
	for _, s := range slicesOf(ctx, t, n) {
		devices = append(devices, s.Spec.Devices...)
	}
	return devices
}

func slicesOf(ctx context.Context, t *testing.T, n *node.Node) []resourceapi.ResourceSlice {
	t.Helper()
	var all *resourceapi.ResourceSliceList
	persist(ctx, t, "list slices", func(ctx context.Context) (err error) {
		all, err = n.Client.ResourceV1().ResourceSlices().List(ctx,
			metav1.ListOptions{FieldSelector: "spec.driver=gpu.nvidia.com"})
		return err
	})
	return all.Items
}

// prepared asks whether so many claims are prepared, by their files.
func prepared(want int) error {
	files, err := filepath.Glob("/var/lib/gpu-device-plugin/claims/*.json")
	if err == nil && len(files) != want {
		err = fmt.Errorf("%d claims are prepared, want %d", len(files), want)
	}
	return err
}

// marker is an argument of the first process of containers that are looked for by it.
const marker = "e2e-container-with-a-claim"

// A seen container is one in which such a process lives, with the device nodes of GPUs that it
// sees.
type seen struct {
	pid   int
	nodes []string
}

// containers returns them by their mount namespace: what a shell has just forked has its arguments,
// too.
func containers() map[string]seen {
	found := map[string]seen{}
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		line, err := os.ReadFile(file)
		if err != nil || !bytes.HasSuffix(bytes.TrimRight(line, "\x00"), []byte(marker)) {
			continue // it has ended, or is another one
		}
		var pid int
		if _, err := fmt.Sscanf(file, "/proc/%d/", &pid); err != nil {
			continue
		}
		namespace, err := os.Readlink(filepath.Join(filepath.Dir(file), "ns/mnt"))
		if err != nil {
			continue
		}
		one := seen{pid: pid}
		paths, _ := filepath.Glob(filepath.Join(filepath.Dir(file), "root/dev/nvidia[0-9]*"))
		for _, path := range paths {
			one.nodes = append(one.nodes, filepath.Base(path))
		}
		found[namespace] = one
	}
	return found
}

// overlap returns which GPUs two containers see that live at the same time, if any. What it sees
// first is looked at again, as containers end and begin meanwhile.
func overlap() error {
	first := containers()
	users := map[string][]string{}
	for namespace, c := range first {
		for _, name := range c.nodes {
			users[name] = append(users[name], namespace)
		}
	}
	for name, of := range users {
		if len(of) < 2 {
			continue
		}
		again := containers()
		of = slices.DeleteFunc(of, func(namespace string) bool { return !slices.Contains(again[namespace].nodes, name) })
		if len(of) > 1 {
			return fmt.Errorf("%d containers have /dev/%s at the same time", len(of), name)
		}
	}
	return nil
}

// deletedByForce: pods with claims on all GPUs are deleted by force and made again, 200 times,
// while their containers end two seconds later. No two containers ever see one GPU.
func deletedByForce(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	const times = 200
	startProxy(t)
	changeToClaims(ctx, t, n)
	makeTemplate(ctx, t, n, template, oneGPU)

	looking, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	looks, most := 0, 0
	running.Go(func() {
		for looking.Err() == nil {
			if err := overlap(); err != nil {
				t.Error(err)
				return
			}
			looks, most = looks+1, max(most, len(containers()))
			select {
			case <-looking.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	end := sync.OnceFunc(func() {
		stop()
		running.Wait()
	})
	t.Cleanup(end)

	start := time.Now()
	create := func(name string) { startPod(ctx, t, n, stubborn(name, template)) }
	for i := range gpus - 2 {
		create(fmt.Sprintf("force-%d", i))
	}
	for i := range times {
		name := fmt.Sprintf("force-%d", i%(gpus-2))
		if i%5 != 0 { // some go before they have run
			waitPod(ctx, t, n, name, isRunning)
		}
		deletePod(ctx, t, n, name)
		create(name)
	}
	for i := range gpus - 2 {
		waitPod(ctx, t, n, fmt.Sprintf("force-%d", i), isRunning)
	}
	phase(fmt.Sprintf("%d pods deleted by force", times), start)
	refused := 0
	events, err := n.Client.CoreV1().Events(corev1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Items {
		if strings.Contains(e.Message, "is in use by the claim") {
			refused += int(max(1, e.Count))
		}
	}
	end()
	early := 0 // kubelet gave claims back whose containers had not ended
	log := kubectl(ctx, t, n, "--namespace", namespace, "logs", "--tail=-1", theDaemonPod(ctx, t, n).Name)
	for line := range strings.Lines(log) {
		if strings.Contains(line, "NodeUnprepareResources") &&
			regexp.MustCompile(`took="[1-9][0-9.]*s"|is still running`).MatchString(line) {
			early++
		}
	}
	t.Logf("%d looks at the containers, %d of them at most; the driver refused a GPU %d times as the claim of before had it; kubelet gave a claim "+
		"back %d times before its containers had ended", looks, most, refused, early)
	if most < gpus-2 {
		t.Errorf("%d containers were seen at once, want %d", most, gpus-2)
	}
	for i := range gpus - 2 {
		deletePod(ctx, t, n, fmt.Sprintf("force-%d", i))
	}
	wait(ctx, t, func(context.Context) error { return prepared(0) })
	waitDevices(ctx, t, n, gpus-2)
}

// claimsWithoutAPIServer: while the API server is away for five minutes, a pod with a claim runs
// on, the claim of one that ends is given back, and a GPU becomes ill and well. Afterwards no slice
// is written.
func claimsWithoutAPIServer(ctx context.Context, t *testing.T, n *node.Node, _ podresources.PodResourcesListerClient) {
	const away = 5 * time.Minute
	startProxy(t)
	held := changeToClaims(ctx, t, n)
	makeTemplate(ctx, t, n, template, oneGPU)
	script := map[string]string{"stays": "while :; do busybox sleep 1; done",
		"ends": "while [ ! -e /end ]; do busybox sleep 1; done"}
	for _, name := range slices.Sorted(maps.Keys(script)) {
		pod := podWith(name, corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(template)})
		pod.Spec.Containers[0].Command = []string{"busybox", "sh", "-c", script[name], marker}
		startPod(ctx, t, n, pod)
		waitPod(ctx, t, n, name, isRunning)
	}
	wait(ctx, t, func(context.Context) error { return prepared(2) })
	stays, given := getPod(ctx, t, n, "stays"), nodesIn(ctx, t, n, "stays")
	taken := slices.Concat(held, given, nodesIn(ctx, t, n, "ends"))
	all := simulatedGPUs(ctx, t, n)
	ill := slices.IndexFunc(all, func(g simulated) bool { return !slices.Contains(taken, filepath.Base(g.node())) })
	before := versions(slicesOf(ctx, t, n))

	n.StopAPIServer()
	start := time.Now()
	simulate(ctx, t, "xid", "--gpu", all[ill].UUID, "--xid", "48")
	for _, c := range containers() { // that of the pod that is to end
		if !slices.Equal(c.nodes, given) {
			if err := os.WriteFile(fmt.Sprintf("/proc/%d/root/end", c.pid), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	wait(ctx, t, func(context.Context) error { return prepared(1) })
	phase("a claim given back without API server", start)
	simulate(ctx, t, "restore", "--gpu", all[ill].UUID)
	limited, cancel := context.WithTimeout(ctx, away-time.Since(start))
	defer cancel()
	for limited.Err() == nil {
		if got := containers(); len(got) != 1 || prepared(1) != nil {
			t.Fatalf("after %v: containers %v, %v", time.Since(start), got, prepared(1))
		}
		select {
		case <-limited.Done():
		case <-time.After(time.Second):
		}
	}
	if err := n.StartAPIServer(ctx); err != nil {
		t.Fatal(err)
	}
	back := time.Now()
	waitPod(ctx, t, n, "ends", func(pod *corev1.Pod) error {
		if pod.Status.Phase != corev1.PodSucceeded {
			return fmt.Errorf("pod is %s", pod.Status.Phase)
		}
		return nil
	})
	waitDevices(ctx, t, n, gpus-2)
	startPod(ctx, t, n, podWith("later", corev1.PodResourceClaim{ResourceClaimTemplateName: ptr.To(template)}))
	waitPod(ctx, t, n, "later", isRunning)
	phase("a pod with a claim after five minutes", back)
	const quiet = 20 * time.Second // all that is to be written is written a second later
	limited, cancel = context.WithTimeout(ctx, quiet)
	defer cancel()
	for limited.Err() == nil {
		if after := versions(slicesOf(ctx, t, n)); !maps.Equal(before, after) {
			t.Fatalf("%v after the API server came back the slices have the versions %v, before it went %v", time.Since(back),
				after, before)
		}
		select {
		case <-limited.Done():
		case <-time.After(time.Second):
		}
	}
	if err := isSame(stays)(getPod(ctx, t, n, "stays")); err != nil {
		t.Error(err)
	}
	// The pods of a node that was away are not Ready until its kubelet has written their status again.
	// The DaemonSet controller never ends a roll-out that begins before the old pod has been Ready for
	// minReadySeconds.
	wait(ctx, t, func(ctx context.Context) error { return rolledOut(ctx, n) })
	for _, name := range []string{"stays", "later"} {
		deletePod(ctx, t, n, name)
	}
	wait(ctx, t, func(context.Context) error { return prepared(0) })
}

// versions returns the versions of slices by name.
func versions(of []resourceapi.ResourceSlice) map[string]string {
	found := map[string]string{}
	for _, s := range of {
		found[s.Name] = s.ResourceVersion
	}
	return found
}
