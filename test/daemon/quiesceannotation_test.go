package daemon

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// quiesceKey begins the annotations of the Node by which the driver is released.
const quiesceKey = "gpu-device-plugin.github.io/quiesce."

// TestQuiesceAnnotation: an annotation of the Node releases the driver of a real daemon, also through a
// kill, and the next process uses it again at the time that the annotation has. Then another annotation
// is obeyed, and ends when the annotation goes.
func TestQuiesceAnnotation(t *testing.T) {
	t.Parallel()
	s, server := openAgent(t, "", "--node-quiesce", "--state-dir", t.TempDir())
	s.start()
	s.shows(8, 8)
	const key = quiesceKey
	annotate := func(until string) {
		t.Helper()
		if err := server.ChangeNode(nodeName, func(n *corev1.Node) {
			if n.Annotations == nil {
				n.Annotations = map[string]string{}
			}
			n.Annotations[key+"until"], n.Annotations[key+"by"] = until, "kured"
			if until == "" {
				delete(n.Annotations, key+"until")
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	says := func(state string) {
		t.Helper()
		s.eventually("the Node says "+state, func() bool {
			n, err := server.Node(nodeName)
			return err == nil && n.Annotations[key+"state"] == state &&
				(state == "" || strings.Contains(n.Annotations[key+"answer"], `"by":"kured"`))
		})
	}
	until := time.Now().Add(40 * time.Second).Truncate(time.Second)
	annotate(until.UTC().Format(time.RFC3339))
	says("done")
	s.shows(8, 0)
	s.kill()
	s.start()
	says("ended")
	if early := time.Until(until); early > 0 {
		t.Errorf("it ended %v early", early)
	}
	s.shows(8, 8)
	annotate(time.Now().Add(time.Hour).UTC().Format(time.RFC3339))
	says("done")
	s.shows(8, 0)
	annotate("")
	says("")
	s.shows(8, 8)
}
