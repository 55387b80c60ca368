package fleet

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	authv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"github.com/gpu-device-plugin/gpu-device-plugin/test/loopback"
	"github.com/gpu-device-plugin/gpu-device-plugin/test/poll"
)

const kueueSpace = "kueue-system"

// A kueue is Kueue's controller with what its chart installs, but as a process beside the API
// server.
type kueue struct {
	*quotaCluster
	health, host string // where its probes and its webhooks are
	port         int    // of the webhooks
	certificates string // folder of what the webhooks use
	account      string // path of the kubeconfig with its rights
	process      process
}

// installKueue installs Kueue's chart. The service of its webhooks leads to a process on this
// machine.
func (c *quotaCluster) installKueue() *kueue {
	c.t.Helper()
	k := &kueue{quotaCluster: c, health: c.freeAddress(), certificates: c.t.TempDir()}
	webhooks, err := net.ResolveTCPAddr("tcp", c.freeAddress())
	if err != nil {
		c.t.Fatal(err)
	}
	k.host, k.port = webhooks.IP.String(), webhooks.Port
	c.helm("install", "kueue", filepath.Join(*kueueDir, "chart"), "--namespace", kueueSpace, "--create-namespace")
	k.redirect()
	k.account = writeKubeconfig(c.t, accountToken(c.t, c.admin, kueueSpace, "kueue-controller-manager", nil), "kueue")
	return k
}

func (c *quotaCluster) freeAddress() string {
	c.t.Helper()
	address, err := loopback.Free(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	return address
}

// redirect has the API server find the webhooks at the address of the process, still by the name of
// their service, which is the one in their certificate.
func (k *kueue) redirect() {
	k.t.Helper()
	ctx := k.t.Context()
	const leads = `{"spec": {"type": "ExternalName", "externalName": %q, "clusterIP": null, "clusterIPs": null}}`
	patch := fmt.Appendf(nil, leads, k.host)
	_, err := k.admin.CoreV1().Services(kueueSpace).Patch(
		ctx, "kueue-webhook-service", types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	port := func(c *admissionv1.WebhookClientConfig) { c.Service.Port = new(int32(k.port)) }
	mutating := k.admin.AdmissionregistrationV1().MutatingWebhookConfigurations()
	m, err := mutating.Get(ctx, "kueue-mutating-webhook-configuration", metav1.GetOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	for i := range m.Webhooks {
		port(&m.Webhooks[i].ClientConfig)
	}
	if _, err := mutating.Update(ctx, m, metav1.UpdateOptions{}); err != nil {
		k.t.Fatal(err)
	}
	validating := k.admin.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	v, err := validating.Get(ctx, "kueue-validating-webhook-configuration", metav1.GetOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	for i := range v.Webhooks {
		port(&v.Webhooks[i].ClientConfig)
	}
	if _, err := validating.Update(ctx, v, metav1.UpdateOptions{}); err != nil {
		k.t.Fatal(err)
	}
	// Only these have versions that a webhook converts.
	patch = fmt.Appendf(nil, `{"spec": {"conversion": {"webhook": {"clientConfig": {"service": {"port": %d}}}}}}`, k.port)
	for _, name := range []string{"clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads"} {
		path := "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + name + ".kueue.x-k8s.io"
		if err := k.admin.RESTClient().Patch(types.MergePatchType).AbsPath(path).Body(patch).Do(ctx).Error(); err != nil {
			k.t.Fatal(err)
		}
	}
}

// start starts the controller with the configuration of its chart and these mappings, and returns
// when it is ready.
func (k *kueue) start(mappings []map[string]any) {
	k.t.Helper()
	maps := k.admin.CoreV1().ConfigMaps(kueueSpace)
	installed, err := maps.Get(k.t.Context(), "kueue-manager-config", metav1.GetOptions{})
	if err != nil {
		k.t.Fatal(err)
	}
	var c map[string]any
	if err := yaml.Unmarshal([]byte(installed.Data["controller_manager_config.yaml"]), &c); err != nil {
		k.t.Fatal(err)
	}
	c["resources"] = map[string]any{"deviceClassMappings": mappings}
	c["health"] = map[string]any{"healthProbeBindAddress": k.health}
	c["webhook"] = map[string]any{"host": k.host, "port": k.port, "certDir": k.certificates}
	c["metrics"] = map[string]any{"bindAddress": "0"}
	c["leaderElection"] = map[string]any{"leaderElect": false}
	// An API of its own, which keeps its certificate in a fixed folder of the container.
	c["featureGates"] = map[string]any{"VisibilityOnDemand": false}
	text, err := yaml.Marshal(c)
	if err != nil {
		k.t.Fatal(err)
	}
	path := filepath.Join(k.t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		k.t.Fatal(err)
	}
	k.process = run(k.t, filepath.Join(*kueueDir, "kueue"), "--config="+path, "--kubeconfig="+k.account)
	k.mountCertificates()
	poll.Within(k.t, soon, "Kueue is ready", func() bool {
		request, err := http.NewRequestWithContext(k.t.Context(), http.MethodGet, "http://"+k.health+"/readyz", http.NoBody)
		if err != nil {
			k.t.Fatal(err)
		}
		answer, err := http.DefaultClient.Do(request)
		if err != nil {
			return false
		}
		_ = answer.Body.Close()
		return answer.StatusCode == http.StatusOK
	})
}

// mountCertificates writes the Secret with the certificate of the webhooks into their folder, as
// the kubelet does, once the controller has made one.
func (k *kueue) mountCertificates() {
	k.t.Helper()
	secrets := k.admin.CoreV1().Secrets(kueueSpace)
	poll.Within(k.t, soon, "Kueue has a certificate", func() bool {
		secret, err := secrets.Get(k.t.Context(), "kueue-webhook-server-cert", metav1.GetOptions{})
		if err != nil {
			k.t.Fatal(err)
		}
		for _, name := range []string{"tls.key", "tls.crt"} { // the controller waits for the second one
			if len(secret.Data[name]) == 0 {
				return false
			}
			if err := os.WriteFile(filepath.Join(k.certificates, name), secret.Data[name], 0o600); err != nil {
				k.t.Fatal(err)
			}
		}
		return true
	})
}

// stop ends the controller.
func (k *kueue) stop() { k.process.end() }

// apply creates objects as the administrator. The API server calls the webhooks only once it knows
// the certificate.
func (k *kueue) apply(manifest string) {
	k.t.Helper()
	var last string
	poll.Within(k.t, soon, "the objects are created", func() bool {
		kubectl := filepath.Join(*kubernetesDir, "kubectl")
		cmd := exec.CommandContext(k.t.Context(), kubectl, "--kubeconfig="+k.kubeconfig, "apply", "-f", "-")
		cmd.Stdin = bytes.NewReader([]byte(manifest))
		out, err := cmd.CombinedOutput()
		if err != nil && string(out) != last {
			last = string(out)
			k.t.Log(last)
		}
		return err == nil
	})
}

// get reads an object of Kueue's API.
func (k *kueue) get(path string, object any) {
	k.t.Helper()
	text, err := k.admin.RESTClient().Get().AbsPath("/apis/kueue.x-k8s.io/v1beta2" + path).Do(k.t.Context()).Raw()
	if err == nil {
		err = json.Unmarshal(text, object)
	}
	if err != nil {
		k.t.Fatal(err)
	}
}

// documentedMappings returns Kueue's mappings of device classes in docs/dra.md.
func (c *quotaCluster) documentedMappings() []map[string]any {
	c.t.Helper()
	var configuration struct {
		Resources struct{ DeviceClassMappings []map[string]any }
	}
	if err := yaml.UnmarshalStrict([]byte(documented(c.t, "kueue: configuration")), &configuration); err != nil {
		c.t.Fatal(err)
	}
	if n := len(configuration.Resources.DeviceClassMappings); n != 2 {
		c.t.Fatalf("docs/dra.md has %d mappings", n)
	}
	return configuration.Resources.DeviceClassMappings
}

// accountToken returns a token of a service account, and that of a pod of it if there is one.
func accountToken(t *testing.T, admin *kubernetes.Clientset, space, account string, pod *corev1.Pod) string {
	t.Helper()
	request := &authv1.TokenRequest{}
	if pod != nil {
		bound := authv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}
		request.Spec.BoundObjectRef = &bound
	}
	accounts := admin.CoreV1().ServiceAccounts(space)
	request, err := accounts.CreateToken(t.Context(), account, request, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return request.Status.Token
}
