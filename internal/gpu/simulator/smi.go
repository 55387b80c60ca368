package simulator

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// The behaviours of nvidia-smi for a reset.
const (
	resetWorks   = ""
	resetFails   = "fails"   // the driver refuses
	resetHangs   = "hangs"   // hangs until another behaviour is injected
	resetAnother = "another" // resets the next GPU, and reports this one
	resetPeers   = "peers"   // works only for all GPUs with this behaviour together
)

func (n *Node) smiResetLocked(f Fault, t target) error {
	var err error
	t.gpu.smiReset, err = choose("state", f.State, map[string]string{
		"works": resetWorks, resetFails: resetFails, resetHangs: resetHangs, resetAnother: resetAnother,
		resetPeers: resetPeers,
	})
	return err
}

// Reset simulates nvidia-smi --gpu-reset for the GPUs at some PCI addresses. It returns the output
// and the success. A hanging reset ends with ctx.
func (n *Node) Reset(ctx context.Context, addresses []string) (output string, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for {
		gpus := make([]*gpu, 0, len(addresses))
		hangs := false
		for _, a := range addresses {
			i := slices.IndexFunc(n.gpus, func(g *gpu) bool {
				return strings.EqualFold(g.spec.BDF, a) && !g.isRemoved && !g.isLost
			})
			if i < 0 {
				return "Unable to determine the device handle for GPU " + a + ": Unknown Error", false
			}
			gpus = append(gpus, n.gpus[i])
			hangs = hangs || n.gpus[i].smiReset == resetHangs
		}
		if !hangs {
			return n.smiLocked(gpus)
		}
		changed := n.changed
		n.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			n.mu.Lock()
			return "", false
		}
		n.mu.Lock()
	}
}

// smiLocked resets GPUs, or returns why not.
func (n *Node) smiLocked(gpus []*gpu) (output string, ok bool) {
	var refused, missing []string
	for _, g := range gpus {
		if len(n.sessions) > 0 || g.busy() {
			refused = append(refused, "  GPU "+g.spec.BDF+": In use by another client")
		}
		if g.smiReset == resetFails {
			refused = append(refused, "  GPU "+g.spec.BDF+": Unknown Error")
		}
	}
	if len(refused) > 0 {
		return "The following GPUs could not be reset:\n" + strings.Join(refused, "\n"), false
	}
	for _, peer := range n.gpus {
		needs := slices.ContainsFunc(gpus, func(g *gpu) bool { return g.smiReset == resetPeers }) &&
			peer.smiReset == resetPeers
		if needs && !slices.Contains(gpus, peer) {
			missing = append(missing, strconv.Itoa(peer.slot))
		}
	}
	if len(missing) > 0 {
		return "GPU Reset couldn't progress because the specified devices do not meet the reset criterion (e.g. " +
			"NVLink connected GPUs must be reset together). Please append the following device indexes to the " +
			"command line and retry.\n" + strings.Join(missing, ","), false
	}
	for _, g := range gpus {
		at := g
		if g.smiReset == resetAnother {
			at = n.gpus[(g.slot+1)%len(n.gpus)]
		}
		at.readings = readings{aggregateErrors: at.aggregateErrors, smiReset: at.smiReset}
		at.reset()
		n.failures = slices.DeleteFunc(n.failures,
			func(f failure) bool { return f.slot == at.slot && f.ret == nvml.ERROR_RESET_REQUIRED })
		output += fmt.Sprintf("GPU %s was successfully reset.\n", g.spec.BDF)
	}
	n.changeLocked()
	return output + "All done.\n", true
}
