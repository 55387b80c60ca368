package main

import (
	"context"
	"errors"
	"os"
	"slices"
	"syscall"
	"time"
)

func (s *stage) reconfigure(ctx context.Context) error {
	strategies := []string{"", "", "envvar", "cdi-cri", "cdi-annotations", "volume-mounts", "envvar, cdi-cri"}
	return s.configure(ctx, s.all[s.random.IntN(len(s.all))], strategies[s.random.IntN(len(strategies))])
}

// configure puts a configuration in force.
func (s *stage) configure(ctx context.Context, to setting, strategies string) error {
	s.note("configuration: %s, strategies %q", to.name, strategies)
	text := to.file(strategies)
	s.disturb()
	s.mu.Lock()
	var changed []*gpu
	for _, g := range s.gpus {
		if !slices.Equal(s.setting.keys(g), to.keys(g)) {
			changed = append(changed, g)
		}
	}
	s.setting, s.strategies = to, strategies
	s.settleLocked(unheld, changed...)
	s.mu.Unlock()
	err := s.writeConfig(ctx, text)
	s.settle(2 * soon)
	return err
}

// writeConfig writes the configuration file in one of the ways in which files are written.
func (s *stage) writeConfig(ctx context.Context, text string) error {
	switch s.random.IntN(3) {
	case 0: // piece by piece, as some editors do
		if err := os.RemoveAll(s.configFile()); err != nil { // a change behind a link is found at the next look, 10 s later
			return err
		}
		f, err := os.Create(s.configFile())
		if err != nil {
			return err
		}
		for text != "" && err == nil {
			n := min(len(text), 1+s.random.IntN(60))
			_, err = f.WriteString(text[:n])
			text = text[n:]
			pause(ctx, time.Millisecond)
		}
		return errors.Join(err, f.Close())
	case 1: // as kubelet does with a ConfigMap: the file is a link
		if err := replace(s.Path("config/content.yaml"), text); err != nil {
			return err
		}
		_ = os.Remove(s.Path("config/link"))
		if err := os.Symlink("content.yaml", s.Path("config/link")); err != nil {
			return err
		}
		return os.Rename(s.Path("config/link"), s.configFile())
	default:
		return replace(s.configFile(), text)
	}
}

// spoil makes the configuration file one that cannot be used, for a while. Nothing may come of it.
func (s *stage) spoil(ctx context.Context) error {
	s.mu.Lock()
	good := s.setting.file(s.strategies)
	s.mu.Unlock()
	path := s.configFile()
	write := func(text string) func() error {
		return func() error { return os.WriteFile(path+".bad", []byte(text), 0o600) }
	}
	spoiled := []struct {
		how string
		put func() error
	}{
		{"emptied", write("")},
		{"null", write("null\n")},
		{"no YAML", write("version: [v1\n\t{{")},
		{"zeros", write(string(make([]byte, 4096)))},
		{"an unknown strategy", write("version: v1\nflags: {migStrategy: some}\n")},
		{"another version", write("version: v9\n")},
		{"large", write("version: v1\n# " + string(make([]byte, 2<<20)))},
		{"a folder", func() error { return os.Mkdir(path+".bad", 0o700) }},
		{"a FIFO", func() error { return syscall.Mkfifo(path+".bad", 0o600) }},
		{"a link to nothing", func() error { return os.Symlink("nothing", path+".bad") }},
		{"removed", nil},
	}
	bad := spoiled[s.random.IntN(len(spoiled))]
	s.note("the configuration file is %s", bad.how)
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	if bad.put != nil {
		if err := errors.Join(bad.put(), os.Rename(path+".bad", path)); err != nil {
			return err
		}
	}
	s.signal(syscall.SIGHUP)
	pause(ctx, s.between(100*time.Millisecond, 3*time.Second))
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	return replace(path, good)
}

// signal sends a signal to every daemon.
func (s *stage) signal(signal syscall.Signal) {
	for _, n := range s.running() {
		if process := n.Running(); process != nil {
			_ = process.Signal(signal) // one that has ended is told of elsewhere
		}
	}
}

func (s *stage) hangUp(context.Context) error {
	n := 1 + s.random.IntN(20)
	s.note("SIGHUP × %d", n)
	for range n {
		s.signal(syscall.SIGHUP)
	}
	return nil
}
