package config

import (
	"os"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
)

// What concerns the file is seen when it happens, and not only with the next look that is due anyway.
func TestEventsThatConcernTheFile(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		event, path string
		want        bool
	}{
		{"/config/config.yaml", "/config/config.yaml", true},
		{"/config/config.yaml", "/config//config.yaml", true},
		{"./config.yaml", "config.yaml", true},
		{"/config/..data", "/config/config.yaml", true}, // kubelet swaps the content of a ConfigMap
		{"/config/..data_tmp", "/config/config.yaml", false},
		{"/config/..2026_11_21", "/config/config.yaml", false},
		{"/config/other.yaml", "/config/config.yaml", false},
	} {
		if got := concerns(fsnotify.Event{Name: tt.event}, tt.path); got != tt.want {
			t.Errorf("%s concerns %s: %t", tt.event, tt.path, got)
		}
	}
}

// TestEventsOfARelativePath holds what the notices call a file whose path is relative.
func TestEventsOfARelativePath(t *testing.T) {
	t.Chdir(t.TempDir())
	watcher, err := watchDirectory("config.yaml")
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close()
	if err := os.WriteFile("config.yaml", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	select {
	case event := <-watcher.Events:
		if !concerns(event, "config.yaml") {
			t.Errorf("the event is of %q", event.Name)
		}
	case <-time.After(30 * time.Second):
		t.Error("no event")
	}
}
