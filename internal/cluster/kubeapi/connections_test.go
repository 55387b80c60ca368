package kubeapi_test

import (
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/cluster/kubeapi"
)

// TestResumedTLSSessions: the API server signs for the first connection of a process alone.
func TestResumedTLSSessions(t *testing.T) {
	t.Parallel()
	resumed, release := make(chan bool, 3), make(chan struct{})
	requests := 0 // one after the other
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		first := requests == 1
		resumed <- r.TLS.DidResume
		if !first {
			<-release // the connection is taken until then
		}
		_, _ = w.Write([]byte(`{"metadata": {"resourceVersion": "1"}, "items": []}`))
	}))
	defer server.Close()
	defer close(release)
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],
clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}], users: [{name: u, user: {token: t}}]}`,
		server.URL, base64.StdEncoding.EncodeToString(authority))
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	client := kubeapi.New(kubeapi.Options{Kubeconfig: kubeconfig, Node: "n"})
	if _, err := client.Get(t.Context()); err != nil || <-resumed {
		t.Fatalf("the first request: %v", err)
	}
	for i, want := range []bool{false, true} { // the first has the connection that is there
		go func() { _, _ = client.Get(t.Context()) }() // ends with the server
		select {
		case got := <-resumed:
			if got != want {
				t.Errorf("connection %d resumes a session: %v", i+1, got)
			}
		case <-time.After(time.Minute):
			t.Fatal("no request")
		}
	}
}
