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

// Sources are where a Config comes from, beside its file.
type Sources struct {
	// Env looks an environment variable up, as os.LookupEnv does; nil if there are none.
	Env func(name string) (value string, given bool)
	// Flags were declared by AddFlags and parsed; nil if there are none.
	Flags *pflag.FlagSet
	// OwnPIDNamespace says that the process that is configured is in another PID namespace than the
	// node's own, and does not see the processes of other containers.
	OwnPIDNamespace bool
	// Discovery says that the Config is for gpu-feature-discovery. Then the flags were declared by
	// AddDiscoveryFlags.
	Discovery bool
	// Program is which program runs with the Config.
	Program Program
	// NVIDIA says that the program was started under the name of one of NVIDIA's.
	NVIDIA bool
	// Chosen is the configuration file that a label chose; nil for the file of the flags or the
	// environment.
	Chosen *feed.Feed[Chosen]
}

// A Program is a program that runs with a Config. It refuses options that it cannot follow.
type Program int

// The programs.
const (
	AnyProgram   Program = iota
	DevicePlugin         // does not talk to the API server
	NodeAgent            // does
)

// Chosen is which file is the configuration file.
type Chosen struct {
	// File is its path; empty for none: then the defaults hold.
	File string
	// Err is why this is not the file that was asked for; nil if it is.
	Err error
}

// Load makes a Config of flags, environment, the configuration file that they name, and defaults.
// Warnings are for the operator; the error is an *Invalid, or says that the file cannot be read.
func Load(s Sources) (c Config, warnings []Remark, err error) {
	path := s.file()
	if path == "" {
		return s.Resolve("", nil)
	}
	return s.LoadFile(path)
}

// LoadFile makes a Config as Load does, of the configuration file at path.
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
	return s.named()
}

// named returns the path of the configuration file that flags or environment name; empty for none.
func (s Sources) named() string {
	i := slices.IndexFunc(options, func(o option) bool { return o.flag == "config-file" })
	return options[i].resolve(&document{}, s.Env, s.Flags).text
}

// Early returns the configuration of flags and environment alone, without values that are not
// valid. It is for what must be known before the file is read.
func (s Sources) Early() Config {
	var c Config
	(&document{}).resolve(&c, s)
	return c
}

// maxFile is the largest configuration file that is read: what fits into a ConfigMap.
const maxFile = 1 << 20

func readFile(path string) ([]byte, error) {
	data, err := statefile.Read(path, maxFile)
	if err != nil {
		return nil, fmt.Errorf("read configuration file: %w; check --config-file and what is mounted there", err)
	}
	return data, nil
}

// Resolve makes a Config as Load does, of a file that has been read.
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

// reads reports whether the command reads all of these flags. What depends on others is not judged.
func (d *document) reads(flags ...string) bool {
	return !slices.ContainsFunc(flags, func(name string) bool { return !isRead(d.flags, name) })
}

// resolve puts what counts into the Config, and what is wrong with it on record.
func (d *document) resolve(c *Config, s Sources) {
	d.flags = s.Flags
	options := s.options()
	for i := range options {
		o := &options[i]
		chosen := o.resolve(d, s.Env, s.Flags)
		if s.Flags != nil && o.isRead(s.Flags) {
			if names := o.given(s.Flags); len(names) > 1 {
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
	c.CDI.DriverRoot, c.CDI.ContainerDriverRoot, c.CDI.SearchPath = c.Driver.Root, c.Driver.ContainerRoot, c.Driver.SearchPath
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
	d.features(c, s)
	d.driver(c)
	d.blocks(c)
	d.dra(c, s)
}
