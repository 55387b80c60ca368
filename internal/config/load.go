package config

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/feed"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/statefile"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// Sources are the inputs of a Config beside its file.
type Sources struct {
	// Env looks up an environment variable like os.LookupEnv; nil for none.
	Env func(name string) (value string, given bool)
	// Flags are parsed flags of AddFlags; nil for none.
	Flags *pflag.FlagSet
	// OwnPIDNamespace reports whether the configured process is in another PID namespace than the
	// node's and cannot see processes of other containers.
	OwnPIDNamespace bool
	// Discovery reports whether the Config is for gpu-feature-discovery, with flags of
	// AddDiscoveryFlags.
	Discovery bool
	// Program is the program that runs with the Config.
	Program Program
	// NVIDIA reports whether the program was started under the name of one of NVIDIA's.
	NVIDIA bool
	// Chosen is the configuration file chosen by a label; nil for the file of the flags or the
	// environment.
	Chosen *feed.Feed[Chosen]

	// started are the values that options with restart keep, by their flags; nil for none.
	started map[string]string
}

// A Program is a program that runs with a Config. It refuses unsupported options.
type Program int

// The programs.
const (
	AnyProgram   Program = iota
	DevicePlugin         // does not talk to the API server
	NodeAgent            // talks to the API server
)

// Chosen is the choice of a configuration file.
type Chosen struct {
	// File is the path; empty for none, so that the defaults apply.
	File string
	// Err says why the file is not the requested file; nil if it is.
	Err error
}

// Load makes a Config from flags, environment, the configuration file that they name, and defaults.
// Warnings are for the operator. The error is an *Invalid, or a failure to read the file.
func Load(s Sources) (c Config, warnings []Remark, err error) {
	path := s.file()
	if path == "" {
		return s.Resolve("", nil)
	}
	return s.LoadFile(path)
}

// LoadFile makes a Config like Load, with the configuration file at path.
func (s Sources) LoadFile(path string) (c Config, warnings []Remark, err error) {
	data, err := readFile(path)
	if err != nil {
		return Config{}, nil, err
	}
	return s.Resolve(path, data)
}

// file returns the path of the configuration file; empty for none.
func (s Sources) file() string {
	if s.Chosen != nil {
		return s.Chosen.Value().File
	}
	return s.filePath()
}

// filePath returns the path of the configuration file in flags or environment; empty for none.
func (s Sources) filePath() string {
	i := slices.IndexFunc(options, func(o option) bool { return o.flag == "config-file" })
	return options[i].resolve(&document{}, s.Env, s.Flags).text
}

// Early returns the configuration of flags and environment alone, without invalid values. It is for
// settings that are needed before the file is read.
func (s Sources) Early() Config {
	var c Config
	(&document{}).resolve(&c, s)
	return c
}

// maxFile is the largest configuration file that is read: the limit of a ConfigMap.
const maxFile = 1 << 20

func readFile(path string) ([]byte, error) {
	data, err := statefile.Read(path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("read configuration file: %w; check --config-file and what is mounted there", err)
	}
	return data, nil
}

// Resolve makes a Config like Load, from the content of a file.
func (s Sources) Resolve(path string, data []byte) (c Config, warnings []Remark, err error) {
	c, doc, err := s.resolve(path, data)
	return c, doc.warnings.list(), err
}

func (s Sources) resolve(path string, data []byte) (c Config, doc *document, err error) {
	doc = decode(data)
	doc.resolve(&c, s)
	c.File = path
	if path != "" && doc.empty {
		doc.warn("file", 0, "is empty; the defaults apply")
	}
	if doc.problems.count() > 0 {
		return Config{}, doc, &Invalid{File: path, Problems: doc.problems.list()}
	}
	return c, doc, nil
}

// reads reports whether the command reads all of these flags. Other settings are not checked.
func (d *document) reads(flags ...string) bool {
	return !slices.ContainsFunc(flags, func(name string) bool { return !isRead(d.flags, name) })
}

// keep returns the setting that an option with restart has: the one of the start, whatever the file
// says now. A changed value must be valid, because the next process uses it.
func (d *document) keep(o *option, now setting, started map[string]string) setting {
	text, running := started[o.flag]
	if !running || text == now.text {
		return now
	}
	if err := o.set(new(Config), now.text); err != nil && !errors.As(err, new(caution)) {
		d.problem(now.where, now.line, err.Error())
	}
	d.restarts = true
	d.warn(now.where, now.line, fmt.Sprintf("a change needs a restart of the daemon; %q stays in use until then", text))
	return setting{text: text, where: now.where, line: now.line, fallback: now.fallback}
}

// resolve puts the effective values into the Config, and records what is wrong with them.
func (d *document) resolve(c *Config, s Sources) {
	d.flags = s.Flags
	c.started = map[string]string{}
	options := s.options()
	for i := range options {
		o := &options[i]
		chosen := o.resolve(d, s.Env, s.Flags)
		if o.restart {
			chosen = d.keep(o, chosen, s.started)
			c.started[o.flag] = chosen.text
		}
		if s.Flags != nil && o.isRead(s.Flags) {
			if names := o.namesSet(s.Flags); len(names) > 1 {
				d.problem(names[0], 0, "is also given as "+names[1]+"; give one of them")
			}
		}
		if chosen.text == "" && chosen.fallback {
			continue
		}
		err := o.set(c, chosen.text)
		if warning := caution(""); errors.As(err, &warning) {
			d.warn(chosen.where, chosen.line, err.Error())
		} else if err != nil {
			d.problem(chosen.where, chosen.line, err.Error())
		}
		if o.warning != "" {
			d.warn(chosen.where, chosen.line, o.warning)
		}
	}
	if s.Discovery {
		c.discovery(s)
	}
	if s.NVIDIA && c.Compatibility == CompatibilityUnset {
		c.Compatibility = CompatibilityNVIDIA
	}
	c.Resource.MIGParents = c.Compatibility == CompatibilityNVIDIA
	for _, root := range []*string{&c.Driver.Root, &c.Driver.ContainerRoot} {
		if *root == "" {
			*root = "/"
		}
	}
	c.Driver.DevRoot = cmp.Or(c.Driver.DevRoot, c.Driver.Root)
	c.Edits.DevRoot = c.Driver.DevRoot
	c.CDI.DriverRoot, c.CDI.ContainerDriverRoot, c.CDI.SearchPath = c.Driver.Root, c.Driver.ContainerRoot,
		c.Driver.SearchPath
	c.CDI.DevicesOnly = c.Simulate != ""
	if c.Edits.IMEX && c.IMEXRequired {
		c.Resource.Required = inventory.NodeIMEXChannel0
	}
	if c.PreStart.Checks == PreStartClean && s.OwnPIDNamespace && c.Simulate == "" {
		d.problem("--pre-start-checks", 0, "clean is not possible here: the driver does not list the processes of "+
			"other containers; set hostPID: true in the daemon's pod, or use health")
	}
	d.health(c, s)
	d.mig(c, s)
	d.repair(c)
	d.features(c, s)
	d.driver(c)
	d.blocks(c)
	d.dra(c, s)
}
