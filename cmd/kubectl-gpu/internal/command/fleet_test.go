package command_test

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/gpu-device-plugin/gpu-device-plugin/cmd/kubectl-gpu/internal/command"
)

// fleetRole is the variable by which a process of this test is told what it is: nodes or json.
const fleetRole = "KUBECTL_GPU_FLEET"

var fleet = flag.Bool("fleet", false, "list 5,000 Nodes")

// TestFleet lists 5,000 Nodes of 20 kB in a process of its own, by kubectl gpu and as kubectl get
// nodes -o json does, and holds the first to twice the time and memory of the second.
func TestFleet(t *testing.T) {
	switch kubeconfig := os.Getenv("KUBECONFIG"); os.Getenv(fleetRole) {
	case "nodes":
		if code := command.Run(t.Context(), []string{"--ask", "never"}, nil, io.Discard, os.Stderr); code != 0 {
			t.Fatal(code)
		}
		return
	case "json":
		if err := listJSON(t, kubeconfig); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !*fleet {
		t.Skip("make nightly runs it, with -fleet")
	}
	s := newStage(t)
	for i := range 5000 {
		s.addNode(fmt.Sprintf("node-%04d", i), 8, func(n *corev1.Node) {
			for at := range 50 {
				n.Status.Images = append(n.Status.Images, corev1.ContainerImage{SizeBytes: 1 << 30, Names: []string{
					fmt.Sprintf("registry.example.com/team/image-%d@sha256:%s", at,
						strings.Repeat("0", 64)), fmt.Sprintf("registry.example.com/team/image-%d:v1.2.3", at),
				}})
			}
			n.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubelet",
				FieldsV1: metav1.NewFieldsV1(`{"f:status":{` + strings.Repeat(`"f:x":{},`, 500) + `"f:y":{}}}`)}}
		})
	}
	measure := func(role string) (time.Duration, int64) {
		c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestFleet$", "-test.count=1")
		c.Env = append(os.Environ(), fleetRole+"="+role, "KUBECONFIG="+s.server.Kubeconfig())
		began := time.Now()
		out, err := c.CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v: %s", role, err, bytes.TrimSpace(out))
		}
		return time.Since(began), c.ProcessState.SysUsage().(*syscall.Rusage).Maxrss / 1024
	}
	theirs, theirMemory := measure("json")
	ours, ourMemory := measure("nodes")
	t.Logf("5,000 Nodes: kubectl gpu %v and %d MiB; kubectl get nodes -o json %v and %d MiB",
		ours.Round(10*time.Millisecond), ourMemory, theirs.Round(10*time.Millisecond), theirMemory)
	if ours > 2*theirs || ourMemory > 2*theirMemory {
		t.Errorf("it takes more than twice what kubectl get nodes -o json takes")
	}
}

// listJSON does what kubectl get nodes -o json does: it reads pages of 500 into objects without a
// type, and writes them as one list.
func listJSON(t *testing.T, kubeconfig string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	all := &unstructured.UnstructuredList{Object: map[string]any{"kind": "List", "apiVersion": "v1"}}
	for options := (metav1.ListOptions{Limit: 500}); ; {
		page, err := client.Resource(corev1.SchemeGroupVersion.WithResource("nodes")).List(t.Context(), options)
		if err != nil {
			return err
		}
		all.Items = append(all.Items, page.Items...)
		if options.Continue = page.GetContinue(); options.Continue == "" {
			break
		}
	}
	text, err := all.MarshalJSON()
	if err == nil {
		_, err = io.Discard.Write(text)
	}
	return err
}
