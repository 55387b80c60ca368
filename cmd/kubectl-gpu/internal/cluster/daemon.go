package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/util/exec"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/view"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/report/status"
)

const (
	// maxParallel is the number of daemons asked in parallel.
	maxParallel = 20
	// responseTimeout and maxResponse limit the response of one daemon. A status has about 100 kB.
	responseTimeout = 15 * time.Second
	maxResponse     = 8 << 20
	// program is the name of the daemon's program and of its container.
	program = view.Program
)

// Run runs a command of the daemon's program in one of the daemon's pods. The error is the
// error of the command, with its exit status as in k8s.io/client-go/util/exec, or says why
// the command did not run. After the error of ctx, the command may still write to out and
// problems.
func (c *Client) Run(ctx context.Context, pod *corev1.Pod, out, problems io.Writer, arguments ...string) error {
	container := pod.Spec.Containers[0].Name
	for _, each := range pod.Spec.Containers {
		if each.Name == program {
			container = program
		}
	}
	request := c.core.RESTClient().Post().
		Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").VersionedParams(
		&corev1.PodExecOptions{Container: container, Command: append([]string{program}, arguments...), Stdout: true,
			Stderr: true},
		scheme.ParameterCodec)
	// Like kubectl: by websocket, or by SPDY if a proxy does not support websockets.
	websocket, err := remotecommand.NewWebSocketExecutor(c.config, "GET", request.URL().String())
	if err != nil {
		return err
	}
	spdy, err := remotecommand.NewSPDYExecutor(c.config, "POST", request.URL())
	if err != nil {
		return err
	}
	either, err := remotecommand.NewFallbackExecutor(websocket, spdy, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	})
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		ended <- either.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: out, Stderr: problems})
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done(): // client-go ends on ctx only after the connection is open
		return ctx.Err()
	}
}

// output runs a command of the daemon's program in one of its pods, and returns what it printed, up to
// maxResponse, and its exit status. The error is what the command printed as its problem, or says
// why the command did not run or did not end in time.
func (c *Client) output(ctx context.Context, pod *corev1.Pod, arguments ...string) (text []byte, exit int, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, responseTimeout, fmt.Errorf("no answer within %v", responseTimeout))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	full := func() { stop(fmt.Errorf("its answer has more than %d MiB", maxResponse>>20)) }
	out, problems := boundedWriter{full: full}, boundedWriter{full: full}
	err = c.Run(ctx, pod, &out, &problems, arguments...)
	if cause := context.Cause(ctx); cause != nil { // the command may still write to the output
		return nil, 0, cause
	}
	var ended exec.CodeExitError
	if errors.As(err, &ended) {
		exit = ended.Code
	}
	if said := strings.TrimSpace(problems.text.String()); err != nil && said != "" {
		err = errors.New(said)
	}
	return out.text.Bytes(), exit, err
}

// status asks the daemon of a pod for its status, with the holders of devices if it supports them.
func (c *Client) status(ctx context.Context, pod *corev1.Pod) (s status.Status, err error) {
	for _, arguments := range [][]string{{"status", "-o", "json", "--holders"}, {"status", "-o", "json"}} {
		var text []byte
		if text, _, err = c.output(ctx, pod, arguments...); err == nil {
			if err = json.Unmarshal(text, &s); err != nil {
				err = fmt.Errorf("its answer cannot be read: %w", err)
			}
			return s, err
		}
		if !strings.Contains(err.Error(), "unknown flag") { // daemons before v0.2 do not have --holders
			break
		}
	}
	return s, err
}

// A boundedWriter keeps up to maxResponse bytes, and calls full if there are more.
type boundedWriter struct {
	text bytes.Buffer
	full func()
}

func (b *boundedWriter) Write(part []byte) (int, error) {
	if b.text.Len()+len(part) > maxResponse {
		b.full()
		return len(part), nil // an error would not end the command
	}
	return b.text.Write(part)
}

// Statuses asks the daemons of pods, maxParallel at a time, and returns their answers in the order
// of the pods.
func (c *Client) Statuses(ctx context.Context, pods []*corev1.Pod) []view.Answer {
	answers := make([]view.Answer, len(pods))
	var asked errgroup.Group
	asked.SetLimit(maxParallel)
	for i, pod := range pods {
		asked.Go(func() error {
			s, err := c.status(ctx, pod)
			answers[i] = view.Answer{Pod: pod, Status: s, Err: err}
			return nil
		})
	}
	_ = asked.Wait() // no function returns an error
	return answers
}

// maxPreflights is the number of daemons that run preflight in parallel. Each takes up to a second.
const maxPreflights = 60

// Preflights has the daemons of pods run driver preflight for a target, or for the present driver if
// the target is empty, maxPreflights at a time. It returns their reports in the order of the pods.
func (c *Client) Preflights(ctx context.Context, pods []*corev1.Pod, target string) []view.Preflight {
	arguments := []string{"driver", "preflight", "-o", "json"}
	if target != "" {
		arguments = append(arguments, "--to="+target)
	}
	reports := make([]view.Preflight, len(pods))
	var asked errgroup.Group
	asked.SetLimit(maxPreflights)
	for i, pod := range pods {
		asked.Go(func() error {
			text, exit, err := c.output(ctx, pod, arguments...)
			reports[i] = view.NewPreflight(pod.Spec.NodeName, text, exit, err)
			return nil
		})
	}
	_ = asked.Wait() // no function returns an error
	return reports
}

// Metrics returns the metrics of the daemons as text, in the order of the pods; empty without
// metrics. It skips pods without a port named metrics.
func (c *Client) Metrics(ctx context.Context, pods []*corev1.Pod) []string {
	texts := make([]string, len(pods))
	var asked errgroup.Group
	asked.SetLimit(maxParallel)
	for i, pod := range pods {
		asked.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, responseTimeout)
			defer cancel()
			for _, container := range pod.Spec.Containers {
				for _, port := range container.Ports {
					if port.Name == "metrics" {
						texts[i] = c.metrics(ctx, pod, port.ContainerPort)
					}
				}
			}
			return nil
		})
	}
	_ = asked.Wait() // no function returns an error
	return texts
}

// metrics returns the metrics at a port of a pod; empty on failure or if they exceed maxResponse.
func (c *Client) metrics(ctx context.Context, pod *corev1.Pod, port int32) string {
	answer, err := c.core.RESTClient().Get().Namespace(pod.Namespace).Resource("pods").SubResource("proxy").
		Name(fmt.Sprintf("%s:%d", pod.Name, port)).Suffix("metrics").Stream(ctx)
	if err != nil {
		return ""
	}
	defer answer.Close()
	text, err := io.ReadAll(io.LimitReader(answer, maxResponse+1))
	if err != nil || len(text) > maxResponse {
		return ""
	}
	return string(text)
}

// DaemonsOf returns the daemon's pods that run on a node, the leader first. During a rolling update
// there are two. If the user may not list the pods of all namespaces, DaemonsOf searches
// kube-system only.
func (c *Client) DaemonsOf(ctx context.Context, node string) ([]*corev1.Pod, error) {
	n, err := c.core.Nodes().Get(ctx, node, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	o := metav1.ListOptions{FieldSelector: "spec.nodeName=" + node, LabelSelector: c.options.DaemonSelector}
	l, err := c.core.Pods(c.options.DaemonNamespace).List(ctx, o)
	advice := "set --daemon-selector and --daemon-namespace if they differ"
	if apierrors.IsForbidden(err) && c.options.DaemonNamespace == "" {
		advice = "you may not list pods of all namespaces, so only " + defaultNamespace +
			" was searched: set --daemon-namespace"
		if l, err = c.core.Pods(defaultNamespace).List(ctx, o); err != nil {
			err = fmt.Errorf("%s: %w", advice, err)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("find the daemon's pod of node %s: %w", node, err)
	}
	var pods []*corev1.Pod
	for i := range l.Items {
		if p := &l.Items[i]; c.IsDaemon(p) && p.Spec.NodeName == node && view.Runs(p) {
			pods = append(pods, p)
		}
	}
	if len(pods) == 0 {
		return nil, fmt.Errorf("no pod of the daemon runs on node %s: %s; its pods are found by the labels %s; %s",
			node, c.absence(ctx, n, l.Items), c.options.DaemonSelector, advice)
	}
	for _, p := range pods {
		if p.Namespace != pods[0].Namespace {
			return nil,
				fmt.Errorf("pods of two namespaces have the labels of the daemon on node %s, %s and %s: set "+
					"--daemon-namespace", node, pods[0].Namespace, p.Namespace)
		}
	}
	if len(pods) == 1 {
		return pods, nil
	}
	return view.LeadFirst(c.Statuses(ctx, pods))
}

// absence says why none of the pods with the daemon's labels on a node is a running daemon.
func (c *Client) absence(ctx context.Context, node *corev1.Node, pods []corev1.Pod) string {
	f := view.Facts{Nodes: []corev1.Node{*node}, Pods: pods}
	c.daemonSets(ctx, &f.Deployment)
	c.warnings(ctx, &f)
	return f.Absence(node.Name, c.IsDaemon, time.Now())
}
