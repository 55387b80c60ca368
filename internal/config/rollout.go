package config

import (
	"fmt"
	"strconv"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/plan/slots"
)

// Rollout limits how many nodes of the cluster change at the same time.
type Rollout struct {
	// Slots is how many nodes may change at the same time, up to maxSlots; 0 for none.
	Slots int
	// Namespace is the namespace of the Leases; empty for the pod's namespace.
	Namespace string
	// WaveLabel is the label with the number of the node's wave, and TopologyLabel the label whose
	// values only one changing node may have; empty for none.
	WaveLabel, TopologyLabel string
	// WaveSoak is how long the nodes of the earlier waves must have been well, 1 min to 7 days.
	WaveSoak time.Duration
	// Windows are the times at which a change may begin; none for any time.
	Windows []slots.Window
}

// maxSlots bounds the slots: a node reads all of them.
const maxSlots = 1000

// rolloutOptions are the settings of the slots.
var rolloutOptions = []option{
	{
		flag: "rollout-slots", env: []string{"ROLLOUT_SLOTS"}, key: "rollout.slots", fallback: "0",
		usage: "number of nodes of the cluster that may change at the same time; 0: none may, where a change needs " +
			"a slot",
		set: setSlots,
	},
	{
		flag: "rollout-namespace", env: []string{"ROLLOUT_NAMESPACE"}, key: "rollout.namespace",
		usage: "namespace of the Leases that are the slots; default: the namespace of this program's pod",
		set:   text(func(c *Config) *string { return &c.Rollout.Namespace }),
	},
	{
		flag: "rollout-wave-label", env: []string{"ROLLOUT_WAVE_LABEL"}, key: "rollout.waveLabel",
		usage: "label of nodes with the number of their wave; a wave begins when the nodes of the earlier waves have " +
			"been well for --rollout-wave-soak; nodes without the label are the last wave; empty: no waves",
		set: text(func(c *Config) *string { return &c.Rollout.WaveLabel }),
	},
	{
		flag: "rollout-wave-soak", env: []string{"ROLLOUT_WAVE_SOAK"}, key: "rollout.waveSoak", fallback: "10m",
		usage: "how long all nodes of the earlier waves must have been well before a wave begins, 1m to 168h",
		set:   setInterval(func(c *Config) *time.Duration { return &c.Rollout.WaveSoak }, time.Minute, 7*24*time.Hour),
	},
	{
		flag: "rollout-topology-label", env: []string{"ROLLOUT_TOPOLOGY_LABEL"}, key: "rollout.topologyLabel",
		usage: "label of nodes, for example of their rack; of the nodes with the same value one changes at a time; " +
			"empty: no such limit",
		set: text(func(c *Config) *string { return &c.Rollout.TopologyLabel }),
	},
	{
		flag: "rollout-windows", env: []string{"ROLLOUT_WINDOWS"}, key: "rollout.windows", kind: kindList,
		usage: "times in UTC at which a change may begin, such as \"Sat 22:00-04:00\" or \"Mon-Fri 01:00-05:00\"; " +
			"empty: any time",
		set: setWindows,
	},
}

// setSlots sets the number of slots.
func setSlots(c *Config, text string) error {
	number, err := strconv.Atoi(text)
	if err != nil || number < 0 || number > maxSlots {
		return fmt.Errorf("%q is not a number from 0 to %d", text, maxSlots)
	}
	c.Rollout.Slots = number
	return nil
}

// setWindows sets the maintenance windows.
func setWindows(c *Config, text string) error {
	for _, item := range splitList(text) {
		w, err := slots.ParseWindow(item)
		if err != nil {
			return err
		}
		c.Rollout.Windows = append(c.Rollout.Windows, w)
	}
	return nil
}

// repair checks what happens to GPUs whose remedy is a reset.
func (d *document) repair(c *Config) {
	if c.Repair.Acts() && c.Rollout.Slots == 0 && d.reads("repair", "rollout-slots") {
		d.refuse("health.repair", "the cluster has no slots, so no GPU could be repaired: set rollout.slots")
	}
}
