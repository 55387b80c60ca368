package scenario

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// file is the checkpoint that kubelet's device manager keeps. It names every holder, init
// containers included, and a kubelet that starts goes by it.
var file = []scenario{
	{name: "the checkpoint names what a pod holds, by NUMA node", run: func(l *lab) {
		p := l.serve("p.sock", Script{}, device("a", v1beta1.Healthy, 0), device("b", v1beta1.Healthy, 0, 1),
			device("c", v1beta1.Healthy))
		l.must(p.Register(l.ctx))
		l.shows(3, 3)
		l.admit("pod", 3)
		l.same("holders", map[string]map[string][]string{"pod/main": {"-1": {"c"}, "0": {"a", "b"}, "1": {"b"}}}, l.holders())
	}},
	{name: "the end of a pod is in the checkpoint once kubelet was asked and a list came, though it is the same list",
		run: func(l *lab) {
			p := l.start("p.sock", Script{}, "a", "b")
			l.admit("ended", 1)
			l.admit("stays", 1)
			before := l.holders()
			l.subject.Remove("ended")
			was := l.checkpointFile()
			p.Send(devices("a", "b")...)
			l.eventually("the file is another", func() bool { return !os.SameFile(was, l.checkpointFile()) })
			l.same("holders before kubelet was asked", before, l.holders())

			_, err := l.podResources().List(l.ctx, &podresources.ListPodResourcesRequest{})
			l.must(err)
			l.same("holders before another list", before, l.holders())
			p.Send(devices("a", "b")...)
			l.eventually("the ended pod is not in the file", func() bool { return len(l.holders()) == 1 })
		}},
}

func (l *lab) checkpointFile() os.FileInfo {
	l.Helper()
	info, err := os.Stat(filepath.Join(l.dir, "kubelet_internal_checkpoint"))
	l.must(err)
	return info
}

// holders returns what the checkpoint says is held: pod/container → NUMA node → IDs.
func (l *lab) holders() map[string]map[string][]string {
	l.Helper()
	content, err := os.ReadFile(filepath.Join(l.dir, "kubelet_internal_checkpoint"))
	l.must(err)

	var saved struct {
		Data struct {
			PodDeviceEntries []struct {
				PodUID, ContainerName, ResourceName string
				DeviceIDs                           map[string][]string
			}
		}
	}
	l.must(json.Unmarshal(content, &saved))
	held := map[string]map[string][]string{}
	for _, e := range saved.Data.PodDeviceEntries {
		for _, ids := range e.DeviceIDs {
			slices.Sort(ids)
		}
		held[e.PodUID+"/"+e.ContainerName] = e.DeviceIDs
	}
	return held
}
