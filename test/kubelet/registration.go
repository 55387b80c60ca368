package kubelet

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// RegisterMode says how a kubelet answers Register.
type RegisterMode int

// The ways to answer Register.
const (
	RegisterAnswers  RegisterMode = iota // as kubelet does
	RegisterRefuses                      // with an error, before it has looked at the request
	RegisterHangs                        // not, before it has looked at the request
	RegisterConnects                     // not, but it has connected and begun ListAndWatch: the answer is lost
	RegisterIsLate                       // as kubelet does, but later, and also if the caller has gone by then
	// and closes its connection before ListAndWatch, as 1.36 may when another stream ends.
	RegisterHangsUp
	registerModeCount = iota
)

func (m RegisterMode) String() string {
	return [registerModeCount]string{"answers", "refuses", "hangs", "connects", "is late", "hangs up"}[m]
}

// gate holds Register calls back while the mode says so. The zero value answers.
type gate struct {
	mu      sync.Mutex // guards all following fields
	mode    RegisterMode
	changed chan struct{}
}

func (g *gate) set(mode RegisterMode) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mode = mode
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
}

// look returns the mode and a channel that is closed when it changes.
func (g *gate) look() (RegisterMode, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	return g.mode, g.changed
}

// wait returns when the mode is another than the given one.
func (g *gate) wait(ctx context.Context, mode RegisterMode) error {
	for {
		now, changed := g.look()
		if now != mode {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// registration is kubelet's Registration service.
type registration struct {
	v1beta1.UnimplementedRegistrationServer
	m *manager
}

func (r registration) Register(ctx context.Context, request *v1beta1.RegisterRequest) (*v1beta1.Empty, error) {
	event := Event{
		Resource: request.GetResourceName(),
		Endpoint: filepath.Join(r.m.dir, request.GetEndpoint()),
	}
	event.Kind = Registering
	r.m.log.add(event)
	if err := r.register(ctx, request, event.Endpoint); err != nil {
		event.Kind, event.Err = Refused, err
		r.m.log.add(event)
		return nil, err
	}
	if err := r.m.gate.wait(ctx, RegisterConnects); err != nil {
		return nil, err
	}
	return &v1beta1.Empty{}, nil
}

func (r registration) register(ctx context.Context, request *v1beta1.RegisterRequest, path string) error {
	if err := r.m.gate.wait(ctx, RegisterHangs); err != nil {
		return err
	}
	if err := r.m.gate.wait(r.m.ctx, RegisterIsLate); err != nil {
		return err
	}
	if mode, _ := r.m.gate.look(); mode == RegisterRefuses {
		return errors.New("register refused, as the test asked")
	}
	if request.GetVersion() != v1beta1.Version {
		return fmt.Errorf("requested API version %q is not supported by kubelet; supported is %q",
			request.GetVersion(), v1beta1.Version)
	}
	if !extendedResource(request.GetResourceName()) {
		return fmt.Errorf("the ResourceName %q is invalid", request.GetResourceName())
	}
	return r.m.connect(ctx, request.GetResourceName(), path)
}

var (
	qualifiedPrefix = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	qualifiedName   = regexp.MustCompile(`^([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$`)
)

// extendedResource reports whether kubelet takes name for a resource that a plugin may bring:
// prefixed, not of Kubernetes' own, and still a qualified name with "requests." before it, which is
// how quotas name it.
func extendedResource(name string) bool {
	if strings.Contains(name, "kubernetes.io/") || strings.HasPrefix(name, "requests.") {
		return false
	}
	prefix, rest, found := strings.Cut("requests."+name, "/")
	return found && len(prefix) <= 253 && qualifiedPrefix.MatchString(prefix) &&
		len(rest) <= 63 && qualifiedName.MatchString(rest)
}
