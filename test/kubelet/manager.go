package kubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/clock"
)

// stopGrace is how long a resource stays in capacity after its endpoint was stopped.
const stopGrace = 5 * time.Minute

// set is a set of device IDs.
type set map[string]struct{}

// endpoint is where the calls of an admission go.
type endpoint struct {
	path    string
	api     v1beta1.DevicePluginClient   // nil in one known from the checkpoint alone
	options *v1beta1.DevicePluginOptions // as answered during Register; nil in one known from the checkpoint alone
	stopped time.Time                    // zero while it is live
}

// manager is one incarnation of kubelet: what is in it is lost when kubelet's process ends.
type manager struct {
	dir     string
	version Version
	clock   clock.PassiveClock
	log     *eventLog
	gate    *gate
	pods    *podTable
	// allocating is the Kubelet's.
	allocating *atomic.Pointer[func(Moment)]
	// seesEndsAfter is the option of the Kubelet.
	seesEndsAfter time.Duration

	ctx     context.Context //nolint:containedctx // ends with the process, as the streams that begin in a Register call do
	end     context.CancelFunc
	streams sync.WaitGroup
	saving  sync.Mutex // one checkpoint is written at a time

	mu        sync.Mutex                      // guards all following fields
	servers   map[string]*grpc.Server         // by socket path
	conns     map[*client]struct{}            // everything dialled and not closed
	clients   map[string][]*client            // by resource
	endpoints map[string]*endpoint            // by resource: the one that is asked
	siblings  map[string]map[string]*endpoint // 1.37: resource → socket path → live endpoint

	all       map[string]map[string]*v1beta1.Device // resource → ID → device, of the last list
	healthy   map[string]set
	unhealthy map[string]set
	allocated map[string]set // what kubelet thinks is in use
	admitted  string         // the pod for which devices are chosen, and not noted yet
	held      []holding      // what containers were given
}

// startManager does what kubelet's device manager does when it starts.
func startManager(k *Kubelet) (*manager, error) {
	m := &manager{
		dir: k.options.Dir, version: k.options.Version, clock: k.options.Clock, log: k.log, gate: &k.gate, pods: &k.pods,
		allocating: &k.allocating, seesEndsAfter: k.options.SeesEndsAfter,
		servers:   map[string]*grpc.Server{},
		conns:     map[*client]struct{}{},
		clients:   map[string][]*client{},
		endpoints: map[string]*endpoint{},
		siblings:  map[string]map[string]*endpoint{},
		all:       map[string]map[string]*v1beta1.Device{},
		healthy:   map[string]set{},
		unhealthy: map[string]set{},
		allocated: map[string]set{},
	}
	if err := os.MkdirAll(m.dir, 0o750); err != nil {
		return nil, err
	}
	m.readCheckpoint()
	m.ctx, m.end = context.WithCancel(context.Background())
	if path := k.options.PodResourcesSocket; path != "" {
		register := func(s *grpc.Server) { podresources.RegisterPodResourcesListerServer(s, resourcesService{m: m}) }
		if err := m.serve(path, register, grpc.UnaryInterceptor(new(limiter).intercept)); err != nil {
			m.stop()
			return nil, err
		}
	}
	if k.options.Starting != nil {
		k.options.Starting()
	}
	if err := m.wipeSockets(); err != nil {
		m.stop()
		return nil, err
	}
	if err := m.listen(); err != nil {
		m.stop()
		return nil, err
	}
	return m, nil
}

// wipeSockets removes the sockets in the directory, and nothing else.
func (m *manager) wipeSockets() error {
	entries, err := os.ReadDir(m.dir)
	if err != nil {
		return err
	}
	var failed []error
	for _, entry := range entries {
		path := filepath.Join(m.dir, entry.Name())
		// Kubelet follows links here: one that leads to a socket goes too.
		if info, err := os.Stat(path); err != nil || info.Mode().Type() != os.ModeSocket {
			continue
		}
		failed = append(failed, os.RemoveAll(path))
	}
	return errors.Join(failed...)
}

// listen serves Registration on kubelet.sock, in place of what is there.
func (m *manager) listen() error {
	return m.serve(filepath.Join(m.dir, "kubelet.sock"), func(s *grpc.Server) {
		v1beta1.RegisterRegistrationServer(s, registration{m: m})
	})
}

// serve serves on a socket, in place of whatever is there, until the process ends.
func (m *manager) serve(path string, register func(*grpc.Server), options ...grpc.ServerOption) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	// A process that is killed leaves its sockets behind.
	listener.(*net.UnixListener).SetUnlinkOnClose(false)
	server := grpc.NewServer(append(options, grpc.WaitForHandlers(true))...)
	register(server)
	m.mu.Lock()
	old := m.servers[path]
	m.servers[path] = server
	m.mu.Unlock()
	m.streams.Go(func() { _ = server.Serve(listener) }) // it ends by Stop alone
	if old != nil {
		old.Stop()
	}
	return nil
}

// stop ends the process: nobody is told but by broken connections. It returns when no goroutine is
// left.
func (m *manager) stop() {
	m.mu.Lock()
	servers := maps.Clone(m.servers)
	m.mu.Unlock()
	for _, server := range servers {
		server.Stop() // waits for its handlers, so no new client comes up after it
	}
	m.end()
	m.mu.Lock()
	conns := maps.Clone(m.conns)
	m.mu.Unlock()
	for c := range conns {
		c.close()
	}
	m.streams.Wait()
}

// connected takes a client's endpoint into use. Kubelet 1.37 refuses a socket path that it holds
// for connected.
func (m *manager) connected(c *client, options *v1beta1.DevicePluginOptions) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := &endpoint{path: c.path, api: c.api, options: options}
	if m.version == V137 {
		if m.siblings[c.resource] == nil {
			m.siblings[c.resource] = map[string]*endpoint{}
		}
		if m.siblings[c.resource][c.path] != nil {
			return fmt.Errorf("device plugin already connected: %s", c.path)
		}
		m.siblings[c.resource][c.path] = e
	}
	m.endpoints[c.resource] = e
	return nil
}

// disconnected stops the endpoint of a plugin that has gone, or in 1.36 whichever the resource has
// now. When it was the last one, the devices turn unhealthy; else any of the others takes over.
func (m *manager) disconnected(resource, path string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := m.clock.Now()
	if m.version == V136 {
		if e := m.endpoints[resource]; e != nil {
			e.stopped = now
			m.markUnhealthyLocked(resource)
		}
		return
	}
	gone := m.siblings[resource][path]
	if gone == nil {
		return
	}
	gone.stopped = now
	delete(m.siblings[resource], path)
	for _, survivor := range m.siblings[resource] {
		m.endpoints[resource] = survivor
		return
	}
	m.markUnhealthyLocked(resource)
}

func (m *manager) markUnhealthyLocked(resource string) {
	unhealthy := set{}
	maps.Copy(unhealthy, m.unhealthy[resource])
	maps.Copy(unhealthy, m.healthy[resource])
	m.unhealthy[resource] = unhealthy
	if _, known := m.healthy[resource]; known {
		m.healthy[resource] = set{}
	}
}

// list takes in what a stream has sent. A list replaces the last one of that resource, also that
// of another plugin; of two devices with one ID the later wins.
func (m *manager) list(c *client, received time.Time, devices []*v1beta1.Device) {
	all, healthy, unhealthy := map[string]*v1beta1.Device{}, set{}, set{}
	for _, device := range devices {
		all[device.GetID()] = device
		// Kubelet does not take an ID out of the other set when it comes twice with unlike health.
		if device.GetHealth() == v1beta1.Healthy {
			healthy[device.GetID()] = struct{}{}
		} else {
			unhealthy[device.GetID()] = struct{}{}
		}
	}
	// Whoever sees the devices finds the event and the checkpoint, too.
	m.saving.Lock()
	defer m.saving.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all[c.resource], m.healthy[c.resource], m.unhealthy[c.resource] = all, healthy, unhealthy
	m.save(m.checkpointLocked())
	m.log.add(Event{Kind: Listed, Time: received, Resource: c.resource, Endpoint: c.path, Devices: devices})
}

// capacity returns what the node shows, and forgets resources whose grace is over.
func (m *manager) capacity() map[string]Quantity {
	m.mu.Lock()
	quantities, forgotten := map[string]Quantity{}, set{}
	for _, sets := range []map[string]set{m.healthy, m.unhealthy} {
		for resource := range sets {
			e := m.endpoints[resource]
			if e == nil || !e.stopped.IsZero() && m.clock.Since(e.stopped) > stopGrace {
				forgotten[resource] = struct{}{}
				continue
			}
			healthy := len(m.healthy[resource])
			quantities[resource] = Quantity{Capacity: healthy + len(m.unhealthy[resource]), Allocatable: healthy}
		}
	}
	for resource := range forgotten {
		delete(m.endpoints, resource)
		delete(m.healthy, resource)
		delete(m.unhealthy, resource)
	}
	m.mu.Unlock()
	if len(forgotten) > 0 {
		m.writeCheckpoint()
	}
	return quantities
}

func (m *manager) devices(resource string) map[string]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	devices := make(map[string]bool, len(m.healthy[resource])+len(m.unhealthy[resource]))
	for id := range m.unhealthy[resource] {
		devices[id] = false
	}
	for id := range m.healthy[resource] {
		devices[id] = true
	}
	return devices
}
