package kubeapi

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"k8s.io/client-go/util/flowcontrol"
)

// closed is a limiter that lets nothing through.
type closed struct{ flowcontrol.RateLimiter }

func (closed) Wait(context.Context) error { return errors.New("too many requests") }

// TestRateLimitOfClaims: a claim is read at once, however many other requests wait.
func TestRateLimitOfClaims(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request) {
		_, _ = w.Write([]byte("{}"))
	}))
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{"current-context": "a", "clusters": [{"name": "a", "cluster": {"server": "` + server.URL +
		`"}}], "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "users": [{"name": "a", "user": {}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c := New(Options{Kubeconfig: path})
	c.limiter = closed{}
	if _, err := c.ResourceClaim(t.Context(), "ns", "a"); err != nil {
		t.Error(err)
	}
	if _, err := c.Get(t.Context()); err == nil {
		t.Error("the node was read although the limiter lets nothing through")
	}
}
