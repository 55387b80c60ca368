package drivervm_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/maintenance/driver/driverapi"
)

var (
	partsFlag = flag.String("parts", "", "the folder with QEMU and the kernels, as test/drivervm/parts prints it")
	cutsFlag  = flag.Int("cuts", 8, "number of power cuts")
	openFlag  = flag.Bool("open", false, "build and load NVIDIA's own open module, whose source parts -long fetches")
	seedFlag  = flag.Uint64("seed", 0, "seed of the power cuts; 0 for one that is printed")
)

const (
	mountPoint = "/var/lib/gpu-device-plugin" // of the disk that survives
	diskSize   = 48 << 20                     // bytes

	// On a machine with a load of 100, a guest was still in the kernel's own tests after a minute.
	bootLimit = 4 * time.Minute // to the first sentence of the guest
	callLimit = 2 * time.Minute // of one request
)

// A machine is what guests are made of. All guests of a test are one node.
type machine struct {
	folder string // for sockets
	disk   *disk
	kernel string // release of the kernel to boot
	append string // further words of the kernel's command line
}

// release returns the release of the kernel that the guests boot, and of one that is only different.
func releases(t *testing.T) (booted, other string) {
	t.Helper()
	if *partsFlag == "" {
		t.Skip("QEMU and Debian's kernels are not here: make driver-vm fetches them")
	}
	read := func(name string) string {
		text, err := os.ReadFile(filepath.Join(*partsFlag, "kernels", name))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(text))
	}
	return read("release"), read("other")
}

// program returns a command with a program of the parts.
func program(ctx context.Context, name string, args ...string) *exec.Cmd {
	root := filepath.Join(*partsFlag, "programs")
	libraries := root + "/lib/x86_64-linux-gnu:" + root + "/usr/lib/x86_64-linux-gnu"
	cmd := exec.CommandContext(ctx, root+"/lib64/ld-linux-x86-64.so.2",
		append([]string{"--library-path", libraries, filepath.Join(root, name)}, args...)...)
	cmd.Env = append(os.Environ(), "QEMU_MODULE_DIR="+root+"/usr/lib/x86_64-linux-gnu/qemu")
	return cmd
}

func mustRun(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// A kit is what all machines have: the files of the tools' disk and of the first file system.
type kit struct{ tools, initramfs, disk string }

var (
	makeKit  sync.Once
	theKit   kit
	kitFiles string // the folder of the kit
)

func TestMain(m *testing.M) {
	flag.Parse()
	var err error
	if kitFiles, err = os.MkdirTemp("", "drivervm"); err != nil {
		panic(err)
	}
	status := m.Run()
	_ = os.RemoveAll(kitFiles)
	os.Exit(status)
}

// newMachine returns a machine with an empty disk. Its second disk has gpu-driver, and each driver as
// a folder in /tools/drivers.
func newMachine(t *testing.T) *machine {
	t.Helper()
	release, other := releases(t)
	makeKit.Do(func() { theKit = newKit(t, release, other) })
	if theKit.initramfs == "" {
		t.Fatal("the tools of the guest could not be made: an earlier test has the reason")
	}
	m := &machine{folder: t.TempDir(), kernel: release, disk: &disk{}}
	var err error
	if m.disk.durable, err = os.ReadFile(theKit.disk); err != nil {
		t.Fatal(err)
	}
	m.disk.listen(t, filepath.Join(m.folder, "disk"))
	return m
}

func newKit(t *testing.T, release, other string) kit {
	t.Helper()
	content := filepath.Join(kitFiles, "tools")
	build := func(name, from, cgo string) {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-tags", "grpcnotrace,nethttpomithttp2,netgo",
			"-ldflags", "-s -w", "-o", name, from)
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		mustRun(t, cmd)
	}
	if err := os.MkdirAll(filepath.Join(content, "drivers"), 0o755); err != nil {
		t.Fatal(err)
	}
	build(content+"/bin/gpu-driver", "../../cmd/gpu-driver", "0")
	build(kitFiles+"/guest", "./guest", "0")
	// The device plugin is not static: it has the loader and the library of this machine.
	build(content+"/bin/gpu-device-plugin", "../../cmd/gpu-device-plugin", "1")
	for name, from := range map[string]string{
		loader: "/lib64/ld-linux-x86-64.so.2", "lib/libc.so.6": "/lib/x86_64-linux-gnu/libc.so.6"} {
		text, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(filepath.Join(content, name)), 0o755)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(content, name), text, 0o700)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []*driver{&oldDriver, &newDriver, &thirdDriver, &failsDriver, &panicDriver, &otherDriver} {
		kernel := release
		if d == &otherDriver {
			kernel = other
		}
		d.pack(t, filepath.Join(content, "drivers", d.version), kernel)
	}
	buildUser(t, content+"/gdrdrv.ko", release)
	if *openFlag {
		for name, text := range filesIn(t, openModules(t, release)) {
			if err := os.WriteFile(filepath.Join(content, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	k := kit{tools: kitFiles + "/tools.img", disk: kitFiles + "/disk.img"}
	makeImage(t, k.tools, 160<<20, "-d", content)
	makeImage(t, k.disk, diskSize)
	guest, err := os.ReadFile(filepath.Join(kitFiles, "guest"))
	if err != nil {
		t.Fatal(err)
	}
	busybox, err := os.ReadFile(filepath.Join(*partsFlag, "kernels/bin/busybox"))
	if err != nil {
		t.Fatal(err)
	}
	type file struct {
		name string
		mode int
		data []byte
	}
	files := []file{
		{"init", 0o100755, guest}, {"bin", 0o40755, nil}, {"bin/busybox", 0o100755, busybox},
		{"bin/sh", 0o120777, []byte("busybox")}, {"bin/train", 0o120777, []byte("/init")},
		{"usr", 0o40755, nil}, {"usr/bin", 0o40755, nil}, {"usr/bin/systemctl", 0o120777, []byte("/init")},
		{"bin/nvidia-persistenced", 0o120777, []byte("/init")}, {"bin/nv-fabricmanager", 0o120777, []byte("/init")},
		{"etc", 0o40755, nil}, {"etc/os-release", 0o100644, []byte("ID=debian\n")},
		{"lib", 0o40755, nil}, {"lib/modules", 0o40755, nil}, {"lib/modules/" + release, 0o40755, nil},
		{"lib/modules/" + other, 0o40755, nil},
		{"var", 0o40755, nil}, {"var/lib", 0o40755, nil}, {"var/lib/dpkg", 0o40755, nil},
		{"var/lib/dpkg/status", 0o100644, nil}, {"modules", 0o40755, nil},
	}
	for _, kernel := range []string{release, other} {
		files = append(files, file{"modules/" + kernel, 0o40755, nil})
		for i, name := range diskModules(t, kernel) {
			text, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, file{fmt.Sprintf("modules/%s/%02d.ko", kernel, i), 0o100644, text})
		}
	}
	var initramfs bytes.Buffer
	for _, f := range append(files, file{"TRAILER!!!", 0, nil}) {
		writeCPIO(&initramfs, f.name, f.mode, f.data)
	}
	if err := os.WriteFile(kitFiles+"/initramfs", initramfs.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	k.initramfs = kitFiles + "/initramfs"
	return k
}

// loader is the loader of programs that are not static, below the folder of the tools.
const loader = "lib/ld-linux-x86-64.so.2"

// diskModules returns the modules that a kernel needs for the disks, in the order in which it can load
// them. QEMU's NVMe disk, for which a kernel needs none, would not do: it treats a write with FUA as any
// other, so that what the guest has synced could be lost.
func diskModules(t *testing.T, kernel string) (all []string) {
	t.Helper()
	found := map[string]string{}
	top := filepath.Join(*partsFlag, "kernels/lib/modules", kernel, "kernel")
	err := filepath.WalkDir(top, func(name string, _ fs.DirEntry, err error) error {
		found[filepath.Base(name)] = name
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"virtio", "virtio_ring", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci",
		"virtio_blk", "crc16", "mbcache", "jbd2", "crc32c_generic", "ext4"} {
		if path := found[name+".ko"]; path != "" { // else it is built in
			all = append(all, path)
		}
	}
	return all
}

// makeImage makes an image of an ext4 file system.
func makeImage(t *testing.T, image string, size int64, options ...string) {
	t.Helper()
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, size); err != nil {
		t.Fatal(err)
	}
	mustRun(t, program(t.Context(), "sbin/mke2fs", append([]string{"-q", "-F", "-t", "ext4", "-E",
		"lazy_itable_init=0,lazy_journal_init=0"}, append(options, image)...)...))
}

// writeCPIO writes an entry of an archive as the kernel unpacks it into its first file system.
func writeCPIO(b *bytes.Buffer, name string, mode int, data []byte) {
	fmt.Fprintf(b, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x", 0, mode, 0, 0, 1, 0, len(data),
		0, 0, 0, 0, len(name)+1, 0)
	pad := func() {
		for b.Len()%4 != 0 {
			b.WriteByte(0)
		}
	}
	b.WriteString(name + "\x00")
	pad()
	b.Write(data)
	pad()
}

// A guest is a machine that runs.
type guest struct {
	t       *testing.T
	m       *machine
	cmd     *exec.Cmd
	port    net.Conn
	lines   *bufio.Reader
	console syncBuffer
	done    chan struct{} // closed when QEMU has ended
	booted  time.Time

	last      string // the last request
	isServing bool   // gpu-driver was started
}

// A syncBuffer is a buffer for the output of a process that runs.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// errOff is the error of a request to a guest whose power was cut.
var errOff = errors.New("the power is off")

// boot starts a guest. The power is cut at a write of the guest to its disk; never if cutAt is 0.
// The error is errOff if the power was cut before the guest was ready.
func (m *machine) boot(t *testing.T, cutAt int) (*guest, error) {
	t.Helper()
	socket := filepath.Join(m.folder, "port")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	kernels := filepath.Join(*partsFlag, "kernels/boot")
	share := filepath.Join(*partsFlag, "programs/usr/share")
	g := &guest{t: t, m: m, done: make(chan struct{}), booted: time.Now(), last: "the start of the kernel"}
	g.cmd = program(context.Background(), "usr/bin/qemu-system-x86_64",
		"-L", share+"/qemu", "-L", share+"/seabios", "-accel", "tcg", "-M", "q35", "-cpu", "qemu64,+rdrand", "-m", "384",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-kernel", filepath.Join(kernels, "vmlinuz-"+m.kernel), "-initrd", theKit.initramfs,
		"-append", "console=ttyS0 loglevel=4 panic=-1 no_timer_check tsc=reliable nokaslr mitigations=off "+
			"unknown_nmi_panic cryptomgr.notests "+m.append,
		"-serial", "stdio", "-chardev", "socket,id=port,path="+socket, "-serial", "chardev:port",
		"-monitor", "unix:"+m.monitor()+",server=on,wait=off",
		"-blockdev", "driver=nbd,node-name=disk,server.type=unix,server.path="+filepath.Join(m.folder, "disk"),
		"-device", "virtio-blk-pci,drive=disk,write-cache=on,addr=4",
		"-blockdev", "driver=file,node-name=tools,read-only=on,filename="+theKit.tools, "-device", "virtio-blk-pci,drive=tools,addr=5")
	g.cmd.Stdout, g.cmd.Stderr = &g.console, &g.console
	m.disk.boot(cutAt, func() { _ = g.cmd.Process.Kill() })
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = g.cmd.Wait()
		close(g.done)
	}()
	t.Cleanup(g.cutPower)
	if err := listener.(*net.UnixListener).SetDeadline(time.Now().Add(bootLimit)); err != nil {
		t.Fatal(err)
	}
	port, err := listener.Accept()
	if err != nil {
		t.Fatalf("QEMU does not start: %v\n%s", err, g.console.String())
	}
	g.port = port
	g.lines = bufio.NewReaderSize(g.port, 1<<20)
	if _, err := g.reply(bootLimit); err != nil {
		return g, err
	}
	for _, args := range [][]string{{"/dev/vda", mountPoint}, {"/dev/vdb", "/tools", "ro"}} {
		if _, err := g.try("mount", args...); err != nil {
			return g, err
		}
	}
	return g, nil
}

// mustBoot starts a guest whose power stays on.
func (m *machine) mustBoot(t *testing.T) *guest {
	t.Helper()
	g, err := m.boot(t, 0)
	if err != nil {
		t.Fatalf("boot: %v\n%s", err, g.console.String())
	}
	return g
}

// cutPower cuts the power.
func (g *guest) cutPower() {
	_ = g.cmd.Process.Kill() // it may have ended
	<-g.done
	if g.port != nil {
		_ = g.port.Close()
	}
}

// powerOff shuts the guest down and keeps what it has written.
func (g *guest) powerOff() {
	g.t.Helper()
	_, err := g.try("power-off")
	if err != nil && !errors.Is(err, errOff) {
		g.t.Fatal(err)
	}
	g.cutPower()
}

// reply reads the answer to a request.
func (g *guest) reply(limit time.Duration) (string, error) {
	g.t.Helper()
	if err := g.port.SetReadDeadline(time.Now().Add(limit)); err != nil {
		return "", errOff
	}
	line, err := g.lines.ReadBytes('\n')
	if errors.Is(err, os.ErrDeadlineExceeded) {
		last := g.last
		g.stacks()
		g.t.Fatalf("the guest does not answer within %v after %s\n%s", limit, last, g.console.String())
	}
	if err != nil {
		return "", errOff
	}
	var r struct{ Output, Error string }
	if err := json.Unmarshal(line, &r); err != nil {
		g.t.Fatalf("the guest answers %q: %v", line, err)
	}
	if r.Error != "" {
		return r.Output, errors.New(r.Error)
	}
	return r.Output, nil
}

// stacks has the guest write to the console what gpu-driver does, and what every process waits for in
// the kernel. A guest that does not answer within a few seconds gets an NMI, at which its kernel
// writes its stack and ends.
func (g *guest) stacks() {
	g.t.Helper()
	const limit = 20 * time.Second
	if err := errors.Join(g.port.SetDeadline(time.Now().Add(limit)), g.send("stacks")); err == nil {
		for { // the answer to an earlier request may come before
			line, err := g.lines.ReadString('\n')
			if err != nil {
				break
			}
			if strings.Contains(line, stacksWritten) {
				return
			}
		}
	}
	g.panics()
}

// stacksWritten is the answer to the request "stacks".
const stacksWritten = "the stacks are on the console"

// panics has the kernel of the guest write its stack to the console, and end.
func (g *guest) panics() {
	g.t.Helper()
	monitor, err := net.Dial("unix", g.m.monitor())
	if err != nil {
		g.t.Logf("the guest gets no NMI: %v", err)
		return
	}
	defer func() { _ = monitor.Close() }()
	if _, err := monitor.Write([]byte("nmi\n")); err != nil {
		g.t.Logf("the guest gets no NMI: %v", err)
		return
	}
	const limit = 20 * time.Second
	select {
	case <-g.done:
	case <-time.After(limit):
		g.t.Logf("the guest does not end within %v after an NMI", limit)
	}
}

// monitor returns the path of the socket of QEMU's monitor.
func (m *machine) monitor() string { return filepath.Join(m.folder, "monitor") }

// send sends a request to the guest.
func (g *guest) send(do string, args ...string) error {
	text, err := json.Marshal(map[string]any{"do": do, "args": args})
	if err != nil {
		return err
	}
	g.last = string(text)
	_, err = g.port.Write(append(text, '\n'))
	return err
}

// try sends a request to the guest and returns the answer.
func (g *guest) try(do string, args ...string) (string, error) {
	g.t.Helper()
	if err := g.send(do, args...); err != nil {
		return "", errOff
	}
	return g.reply(callLimit)
}

// do is try for a request that must not fail.
func (g *guest) do(do string, args ...string) string {
	g.t.Helper()
	out, err := g.try(do, args...)
	if err != nil {
		g.t.Fatalf("%s %s: %v: %s\n%s", do, strings.Join(args, " "), err, out, g.tail())
	}
	return out
}

// tail returns the end of the console.
func (g *guest) tail() string {
	text := g.console.String()
	return text[max(0, len(text)-4000):]
}

// log returns the kernel's log.
func (g *guest) log() string {
	g.t.Helper()
	return g.do("run", "/bin/busybox", "dmesg")
}

// call makes a call of package driverapi.
func (g *guest) call(call string, args ...string) (driverapi.Status, error) {
	g.t.Helper()
	var s driverapi.Status
	text, err := g.try("call", append([]string{call}, args...)...)
	if err != nil {
		return s, err
	}
	err = json.Unmarshal([]byte(text), &s)
	return s, err
}

// newRandom returns the random numbers of a test, and prints their seed.
func newRandom(t *testing.T) *rand.Rand {
	t.Helper()
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64N(1 << 32)
	}
	t.Logf("-seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}
