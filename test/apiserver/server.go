package apiserver

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"k8s.io/client-go/applyconfigurations"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Names of the files in the folder of a Server. The first three are those of a service account in a
// pod.
const (
	tokenFile      = "token"
	caFile         = "ca.crt"
	namespaceFile  = "namespace"
	kubeconfigFile = "kubeconfig"
)

// A Server is an API server over any number of times that it is stopped and resumed. Objects
// outlive a stop. All methods may be called by several goroutines.
type Server struct {
	dir     string
	address string
	memory  bool // clients reach it by Dial alone
	store   *store
	hole    *hole

	mu         sync.Mutex // guards all following fields
	authority  *authority
	token      string
	fault      Fault
	over       chan struct{} // is closed when another fault is set
	skew       time.Duration
	noFeatures bool
	budget     bool         // forbids evictions
	pods       http.Handler // answers pods/exec and pods/proxy; nil if nobody does
	// resourceVersions are those in which resource.k8s.io is served; dropped are fields of devices
	// that are not kept.
	resourceVersions, dropped []string
	countersBeside            bool
	counts                    map[Request]int
	writers                   []string       // who made each request that changed an object
	latest                    map[string]int // lists that were to be the latest, by resource
	current                   *life          // nil while the server is stopped
	watches                   chan struct{}  // closed when all watches are to end
}

// life is the time between a start of the server and its stop.
type life struct {
	http    *http.Server
	memory  *memoryListener // nil for a server that listens on TCP
	stopped chan struct{}   // closed by Stop: no byte passes any more
	ended   chan struct{}   // closed when the server has ended
}

var servers atomic.Uint32 // in this process

// Start starts a server that writes its files into dir, which must exist. The caller owns it and
// ends it with Stop.
func Start(dir string) (*Server, error) { return start(dir, false) }

// StartInMemory starts a server that clients reach by Dial alone. No system call is waited for, so
// that it works in a bubble of testing/synctest, by the time of that.
func StartInMemory(dir string) (*Server, error) { return start(dir, true) }

func start(dir string, memory bool) (*Server, error) {
	// This reads the schema of all types once. With the race detector and on a machine that is busy
	// that takes longer than a client waits for the answer to its first write.
	applyconfigurations.NewTypeConverter(scheme.Scheme)
	// An address of its own keeps the port free while the server is stopped: clients' own ports are on
	// 127.0.0.1.
	pid := os.Getpid()
	ip := fmt.Sprintf("127.%d.%d.%d", 64+servers.Add(1)%64, pid>>8&255, pid&255)
	ca, err := newAuthority(ip)
	if err != nil {
		return nil, err
	}
	s := &Server{
		dir: dir, address: net.JoinHostPort(ip, "0"), memory: memory, store: newStore(), hole: newHole(), authority: ca,
		counts: map[Request]int{}, latest: map[string]int{},
		resourceVersions: []string{"v1"},
		watches:          make(chan struct{}), over: make(chan struct{}),
	}
	if err := s.Resume(); err != nil {
		return nil, err
	}
	err = errors.Join(s.RotateToken(), s.PublishCA(), s.write(namespaceFile, "kube-system"),
		s.writeKubeconfig(kubeconfigFile, ""))
	if err != nil {
		s.Stop()
		return nil, err
	}
	return s, nil
}

// Stop ends the server as a kill would: every connection breaks, and new ones are refused. It
// returns when no goroutine of the server is left. Stopping a stopped server does nothing.
func (s *Server) Stop() {
	s.mu.Lock()
	l := s.current
	s.current = nil
	s.mu.Unlock()
	if l == nil {
		return
	}
	close(l.stopped) // first: closing a connection writes to it
	_ = l.http.Close()
	<-l.ended
}

// Resume starts a stopped server again at the same address, with the same objects.
func (s *Server) Resume() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil {
		return errors.New("start API server: it is running")
	}
	l := &life{stopped: make(chan struct{}), ended: make(chan struct{})}
	var listener net.Listener
	if s.memory {
		l.memory = newMemoryListener()
		listener = l.memory
	} else {
		var config net.ListenConfig
		var err error
		if listener, err = config.Listen(context.Background(), "tcp", s.address); err != nil {
			return fmt.Errorf("start API server: %w", err)
		}
		s.address = listener.Addr().String()
	}
	l.http = &http.Server{
		Handler:           http.HandlerFunc(s.serve),
		ReadHeaderTimeout: time.Minute,
		ErrorLog:          discard,
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(
			*tls.ClientHelloInfo,
		) (*tls.Certificate, error) {
			s.mu.Lock()
			defer s.mu.Unlock()
			return &s.authority.server, nil
		}},
	}
	s.current = l
	go func() {
		defer close(l.ended)
		_ = l.http.ServeTLS(holeListener{listener, s.hole, l.stopped}, "", "")
	}()
	return nil
}

// Dial connects to a server that StartInMemory started, whatever the network and the address.
func (s *Server) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	s.mu.Lock()
	l := s.current
	s.mu.Unlock()
	if l == nil {
		return nil, fmt.Errorf("dial the API server: %w", syscall.ECONNREFUSED)
	}
	return l.memory.dial(ctx)
}

// Kubeconfig is the path of the kubeconfig. It names the files of the token and the certificate
// authority, which clients read again.
func (s *Server) Kubeconfig() string { return filepath.Join(s.dir, kubeconfigFile) }

// KubeconfigAs writes a kubeconfig for a client that is to be told from others, and returns its
// path: see Writers.
func (s *Server) KubeconfigAs(name string) (path string, err error) {
	file := "kubeconfig-" + name
	return filepath.Join(s.dir, file), s.writeKubeconfig(file, name)
}

// Writers returns the names of the clients whose requests changed objects, in the order of these
// requests; empty for Kubeconfig.
func (s *Server) Writers() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.writers)
}

// Dir is the folder with the files token, ca.crt and namespace, as a service account has them in a
// pod.
func (s *Server) Dir() string { return s.dir }

// URL is where the server listens.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return "https://" + s.address
}

// RotateToken makes a new token and writes it. The old one is refused from now on.
func (s *Server) RotateToken() error {
	random := make([]byte, 16)
	_, _ = rand.Read(random) // never fails
	token := hex.EncodeToString(random)
	s.mu.Lock()
	s.token = token
	s.mu.Unlock()
	return s.write(tokenFile, token)
}

// ReplaceCA gives the server a certificate of another authority and breaks all connections. Clients
// do not know that authority before PublishCA.
func (s *Server) ReplaceCA() error {
	s.mu.Lock()
	ip, _, err := net.SplitHostPort(s.address)
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("replace the CA: %w", err)
	}
	ca, err := newAuthority(ip)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.authority = ca
	s.mu.Unlock()
	s.Stop()
	return s.Resume()
}

// PublishCA writes the certificate of the server's authority.
func (s *Server) PublishCA() error {
	s.mu.Lock()
	certificate := s.authority.pem
	s.mu.Unlock()
	return s.write(caFile, string(certificate))
}

// write replaces a file at once, as kubelet does with the files of a projected volume.
func (s *Server) write(name, content string) error {
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path+".new", []byte(content), 0o600); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	return nil
}

func (s *Server) writeKubeconfig(file, client string) error {
	const name = "stand-in"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{Server: s.URL(), CertificateAuthority: filepath.Join(s.dir, caFile)}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{TokenFile: filepath.Join(s.dir, tokenFile), Impersonate: client}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	if err := clientcmd.WriteToFile(*config, filepath.Join(s.dir, file)); err != nil {
		return fmt.Errorf("write kubeconfig: %w", err)
	}
	return nil
}
