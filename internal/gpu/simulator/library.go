package simulator

import (
	"cmp"
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A library is the node's NVML library in one process.
type library struct {
	nvml.Interface // nil: calls that the simulator does not implement panic
	node           *Node

	// Guarded by node.mu.
	version string   // of the loaded library file; empty before the first Init
	inits   int      // Inits without a Shutdown
	session *session // nil when inits is 0
}

var _ nvml.Interface = (*library)(nil)

// A session is the state of a library between its first Init and its last Shutdown.
type session struct {
	node    *Node
	gpus    []*gpu        // by NVML index
	handles []nvml.Device // of gpus: returned for every call
	driver  driver        // at the start of the session
	system  *systemSet    // nil without one
	open    bool
}

// Init opens a session, or counts one more user of the open one.
func (l *library) Init() nvml.Return {
	n := l.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if ret := n.admitLocked("Init", nil); ret != nvml.SUCCESS {
		return ret
	}
	if n.driver.initError != nvml.SUCCESS {
		return n.driver.initError
	}
	l.version = cmp.Or(l.version, n.driver.files, n.driver.version)
	if l.version != n.driver.version {
		return nvml.ERROR_LIB_RM_VERSION_MISMATCH
	}
	if l.inits == 0 {
		l.session = n.beginLocked()
	}
	l.inits++
	return nvml.SUCCESS
}

// Installed returns the version of the driver's files for a new process.
func (l *library) Installed() string {
	l.node.mu.Lock()
	defer l.node.mu.Unlock()
	return cmp.Or(l.node.driver.files, l.node.driver.version)
}

// beginLocked opens a session with the plugged-in GPUs.
func (n *Node) beginLocked() *session {
	s := &session{node: n, driver: n.driver, open: true}
	for _, g := range n.gpus {
		if !g.isRemoved {
			s.gpus = append(s.gpus, g)
			s.handles = append(s.handles, device{session: s, gpu: g})
		}
	}
	n.sessions[s] = struct{}{}
	return s
}

// Shutdown undoes one Init.
func (l *library) Shutdown() nvml.Return {
	n := l.node
	n.mu.Lock()
	defer n.mu.Unlock()
	if ret := n.admitLocked("Shutdown", nil); ret != nvml.SUCCESS {
		return ret
	}
	if l.inits == 0 {
		return nvml.ERROR_UNINITIALIZED
	}
	l.inits--
	if l.inits == 0 {
		l.session.open = false
		delete(n.sessions, l.session)
		l.session = nil
		n.forgetLocked()
		n.changeLocked()
	}
	return nvml.SUCCESS
}

// Extensions returns the library itself.
func (l *library) Extensions() nvml.ExtendedInterface { return l }

// LookupSymbol reports whether the library has a C function. Unlike go-nvml's, it works before
// Init.
func (l *library) LookupSymbol(name string) error {
	l.node.mu.Lock()
	defer l.node.mu.Unlock()
	d := l.node.driver
	if l.session != nil {
		d = l.session.driver
	}
	if !exists(name, d.branch) {
		return fmt.Errorf("look up %s: the library of driver %s does not have it", name, d.version)
	}
	return nil
}

// admitLocked waits until a call may return, and returns its error, or SUCCESS if it may do its
// work. It releases node.mu while it waits.
func (n *Node) admitLocked(call string, g *gpu) nvml.Return {
	n.stallLocked(call, g, nil)
	return n.answerLocked(call, g)
}

// answerLocked is admitLocked without the wait.
func (n *Node) answerLocked(call string, g *gpu) nvml.Return {
	if n.closed {
		return nvml.ERROR_UNKNOWN
	}
	return n.failureLocked(call, g)
}

// admitLocked is Node.admitLocked for calls that need the session.
func (s *session) admitLocked(call string, g *gpu) nvml.Return {
	s.node.stallLocked(call, g, nil)
	return s.answerLocked(call, g)
}

// answerLocked is admitLocked without the wait.
func (s *session) answerLocked(call string, g *gpu) nvml.Return {
	s.node.calls++
	if !exists("nvml"+call, s.driver.branch) {
		panic(fmt.Sprintf("simulator: nvml%s was called, which driver %s does not have: this ends a process that uses "+
			"the real library", call, s.driver.version))
	}
	if ret := s.node.answerLocked(call, g); ret != nvml.SUCCESS {
		return ret
	}
	switch {
	case !s.open:
		s.node.stale++
		return nvml.ERROR_UNINITIALIZED
	case s.node.driver.initError != nvml.SUCCESS:
		return s.node.driver.initError
	case s.node.driver.version != s.driver.version:
		return nvml.ERROR_LIB_RM_VERSION_MISMATCH
	case g != nil && g.isLost:
		return nvml.ERROR_GPU_IS_LOST
	}
	return nvml.SUCCESS
}

// query makes a call about no GPU, with a value as the result.
func query[T any](l *library, call string, answer func(*session) (T, nvml.Return)) (T, nvml.Return) {
	l.node.mu.Lock()
	defer l.node.mu.Unlock()
	var none T
	s := l.session
	if s == nil {
		return none, nvml.ERROR_UNINITIALIZED
	}
	if ret := s.admitLocked(call, nil); ret != nvml.SUCCESS {
		return none, ret
	}
	return answer(s)
}

// SystemGetDriverVersion returns the driver's version.
func (l *library) SystemGetDriverVersion() (string, nvml.Return) {
	return query(l, "SystemGetDriverVersion", func(s *session) (string, nvml.Return) {
		return s.driver.version, nvml.SUCCESS
	})
}

// SystemGetCudaDriverVersion returns the CUDA version, 13000 for 13.0.
func (l *library) SystemGetCudaDriverVersion() (int, nvml.Return) {
	return query(l, "SystemGetCudaDriverVersion_v2", func(s *session) (int, nvml.Return) {
		version, _ := cudaVersion(s.node.profile.CUDA) // Load has parsed the version
		return version, nvml.SUCCESS
	})
}

// SystemGetConfComputeState returns that confidential computing is off, or the injected feature.
func (l *library) SystemGetConfComputeState() (nvml.ConfComputeSystemState, nvml.Return) {
	return query(l, "SystemGetConfComputeState", func(s *session) (nvml.ConfComputeSystemState, nvml.Return) {
		feature := s.node.numberLocked("SystemGetConfComputeState", nil, nvml.CC_SYSTEM_FEATURE_DISABLED)
		return nvml.ConfComputeSystemState{CcFeature: uint32(feature)}, nvml.SUCCESS
	})
}

// SystemGetConfComputeGpusReadyState returns whether the GPUs accept work.
func (l *library) SystemGetConfComputeGpusReadyState() (uint32, nvml.Return) {
	const call = "SystemGetConfComputeGpusReadyState"
	return query(l, call, func(s *session) (uint32, nvml.Return) {
		return uint32(s.node.numberLocked(call, nil, nvml.CC_ACCEPTING_CLIENT_REQUESTS_TRUE)), nvml.SUCCESS
	})
}

// DeviceGetCount returns the number of GPUs at the start of the session.
func (l *library) DeviceGetCount() (int, nvml.Return) {
	return query(l, "DeviceGetCount", func(s *session) (int, nvml.Return) {
		return s.node.numberLocked("DeviceGetCount", nil, len(s.gpus)), nvml.SUCCESS
	})
}

// DeviceGetHandleByIndex returns the GPU with an index. The call is about that GPU, or about no GPU
// if the index is unknown.
func (l *library) DeviceGetHandleByIndex(index int) (nvml.Device, nvml.Return) {
	l.node.mu.Lock()
	defer l.node.mu.Unlock()
	s := l.session
	if s == nil {
		return nil, nvml.ERROR_UNINITIALIZED
	}
	if index < 0 || index >= len(s.gpus) {
		if ret := s.admitLocked("DeviceGetHandleByIndex", nil); ret != nvml.SUCCESS {
			return nil, ret
		}
		return nil, nvml.ERROR_INVALID_ARGUMENT
	}
	if ret := s.admitLocked("DeviceGetHandleByIndex", s.gpus[index]); ret != nvml.SUCCESS {
		return nil, ret
	}
	return s.handles[index], nvml.SUCCESS
}
