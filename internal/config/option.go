package config

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
)

// optionKind is how an option is written.
type optionKind int

const (
	kindText optionKind = iota
	kindBool            // a flag without a value means true
	kindList            // comma-separated; a repeated flag adds to it
)

// An option is one setting of a flag, environment variables and a key of the file.
type option struct {
	// flag is the flag's name, aliases are its former names.
	flag    string
	aliases []string
	// short is a letter that stands for the flag; empty for none.
	short string
	// env are environment variables; the first with a value counts.
	env []string
	// key is the path in the file, such as flags.plugin.passDeviceSpecs; empty if the file cannot
	// contain the option.
	key string
	// fallback is the default.
	fallback string
	kind     optionKind
	usage    string
	// warning is printed when the option has a value.
	warning string
	// restart keeps a changed file from having an effect before the next start of the daemon. The
	// field is in Startup.
	restart bool
	// common puts the flag among the first in help texts.
	common bool
	// empty makes "" a value of its own, which set may refuse. For other options "" means no value.
	empty bool
	// set puts a value into the Config, or returns what is wrong with it in a sentence. A caution
	// as error is a warning.
	set func(*Config, string) error
}

// A caution is a warning of set about an accepted value.
type caution string

func (c caution) Error() string { return string(c) }

// An Option describes the sources of one setting.
type Option struct {
	// Flag is the name of the flag without dashes, and Aliases are its further names.
	Flag    string
	Aliases []string
	// Env are environment variables; the first with a value counts.
	Env []string
	// Key is the path in the configuration file; empty if the file cannot contain the option.
	Key string
	// Default is the value without any source.
	Default string
	// Restart reports whether a change of Key in the file has an effect only after a restart of the
	// daemon.
	Restart bool
	// Usage describes the effect.
	Usage string
}

// Options returns all options of the daemon, in the order of the documentation.
func Options() []Option { return described(options) }

// DiscoveryOptions returns all options of gpu-feature-discovery.
func DiscoveryOptions() []Option { return described(discoveryOptions) }

func described(options []option) []Option {
	all := make([]Option, len(options))
	for i, o := range options {
		all[i] = Option{
			Flag: o.flag, Aliases: o.aliases, Env: o.env, Key: o.key, Default: o.fallback,
			Restart: o.restart, Usage: o.usage,
		}
	}
	return all
}

// A setting is the value of an option in one source.
type setting struct {
	text  string
	where string // for people: key path, flag or environment variable
	line  int
	// fallback reports whether text is the default, because no source has a value.
	fallback bool
}

// resolve returns the effective value of an option: flag over environment over file over default.
func (o *option) resolve(doc *document, env func(string) (string, bool), flags *pflag.FlagSet) setting {
	if o.isRead(flags) {
		if s, given := o.fromFlags(flags); given {
			return s
		}
		if s, given := o.fromEnv(env); given {
			return s
		}
	}
	if s, given := o.fromFile(doc); given {
		return s
	}
	return setting{text: o.fallback, where: "--" + o.flag, fallback: true}
}

// isRead reports whether the command with these flags reads the option.
func (o *option) isRead(flags *pflag.FlagSet) bool { return isRead(flags, o.flag) }

func isRead(flags *pflag.FlagSet, name string) bool {
	if flags == nil {
		return true
	}
	f := flags.Lookup(name)
	return f == nil || f.Annotations[NoEffect] == nil
}

func (o *option) fromFlags(flags *pflag.FlagSet) (setting, bool) {
	if flags == nil {
		return setting{}, false
	}
	names := o.namesSet(flags)
	if names == nil {
		return setting{}, false
	}
	text := flags.Lookup(o.flag).Value.String() // all names share the value
	return setting{text: text, where: names[0]}, o.says(text)
}

// namesSet returns the names under which the flag is set.
func (o *option) namesSet(flags *pflag.FlagSet) []string {
	var names []string
	for _, name := range append([]string{o.flag}, o.aliases...) {
		if f := flags.Lookup(name); f != nil && f.Changed {
			names = append(names, "--"+name)
		}
	}
	return names
}

func (o *option) fromEnv(env func(string) (string, bool)) (setting, bool) {
	if env == nil {
		return setting{}, false
	}
	for _, name := range o.env {
		text, given := env(name)
		if !given {
			continue
		}
		if text == "" && o.kind == kindBool {
			text = "false"
		}
		if o.says(text) {
			return setting{text: text, where: name}, true
		}
	}
	return setting{}, false
}

func (o *option) fromFile(doc *document) (setting, bool) {
	if o.key == "" {
		return setting{}, false
	}
	text, given := textAt(&doc.config, o.key)
	if !given || !o.says(text) {
		return setting{}, false
	}
	return setting{text: text, where: o.key, line: doc.line(o.key)}, true
}

func (o *option) says(text string) bool { return text != "" || o.empty || o.kind == kindBool }

// textAt returns the value at a path of the schema, in the form of a flag.
func textAt(c *v1.Config, path string) (text string, given bool) {
	at := reflect.ValueOf(c).Elem()
	for _, key := range strings.Split(path, ".") {
		field, _, found := lookUp(at, key)
		if !found {
			panic("the schema has no key " + path)
		}
		if field.IsZero() {
			return "", false
		}
		at = reflect.Indirect(field)
	}
	switch value := at.Interface().(type) {
	case bool:
		return strconv.FormatBool(value), true
	case int:
		return strconv.Itoa(value), true
	case string:
		return value, true
	case v1.StringList:
		return strings.Join(value, ","), true
	case v1.Duration:
		return time.Duration(value).String(), true
	case v1.Interval:
		return string(value), true
	case v1.Word:
		return string(value), true
	case []int:
		return strings.Trim(strings.ReplaceAll(fmt.Sprint(value), " ", ","), "[]"), true
	}
	panic(fmt.Sprintf("the key %s has the type %s, which no flag has", path, at.Type()))
}

// Annotations of flags, for help texts.
const (
	Further  = "further"  // shown after the common flags
	NoEffect = "noEffect" // a flag of the daemon that the command does not read
)

var (
	further  = map[string][]string{Further: {}}
	noEffect = map[string][]string{NoEffect: {}}
)

// fewFlags is the largest number of flags in a help text without a division into common and further
// flags.
const fewFlags = 8

// AddFlags declares the flags of the daemon that a command reads, by their names without
// dashes; without names, all flags. The other flags are declared hidden and have no effect,
// nor do their environment variables, so that the command accepts all flags of the daemon.
// Former names of flags are also hidden.
func AddFlags(flags *pflag.FlagSet, read ...string) {
	for _, name := range read {
		if !slices.ContainsFunc(options, func(o option) bool { return o.flag == name }) {
			panic("the daemon has no flag --" + name)
		}
	}
	addFlags(flags, options, read)
}

func addFlags(flags *pflag.FlagSet, options []option, read []string) {
	for i := range options {
		o := &options[i]
		value := &flagValue{text: o.fallback, kind: o.kind}
		for _, name := range append([]string{o.flag}, o.aliases...) {
			short := ""
			if name == o.flag {
				short = o.short
			}
			f := flags.VarPF(value, name, short, o.usage+" [$"+strings.Join(o.env, ", $")+"]")
			f.Hidden = name != o.flag
			switch {
			case len(read) > 0 && !slices.Contains(read, o.flag):
				f.Hidden, f.Annotations = true, noEffect
			case !o.common && (len(read) == 0 || len(read) > fewFlags):
				f.Annotations = further
			}
			if o.kind == kindBool {
				f.NoOptDefVal = "true"
			}
		}
	}
}

// flagValue keeps the text of a flag; resolve interprets it.
type flagValue struct {
	text  string
	kind  optionKind
	isSet bool
}

func (v *flagValue) String() string { return v.text }

func (v *flagValue) Set(text string) error {
	if v.kind == kindList && v.isSet {
		text = v.text + "," + text
	}
	v.text, v.isSet = text, true
	return nil
}

func (v *flagValue) Type() string {
	return map[optionKind]string{kindText: "string", kindBool: "bool", kindList: "strings"}[v.kind]
}

// splitList splits a comma-separated list and drops empty and repeated items.
func splitList(text string) []string {
	var items []string
	seen := map[string]bool{"": true}
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); !seen[item] {
			seen[item] = true
			items = append(items, item)
		}
	}
	return items
}
