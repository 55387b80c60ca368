package config

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/gpu-device-plugin/gpu-device-plugin/api/config/v1"
)

// maxNodes limits the nodes of a file: YAML aliases can multiply a few nodes to very many.
const maxNodes = 1 << 17

// A document is a decoded file with the findings of decoding.
type document struct {
	config   v1.Config
	empty    bool            // the file has at most comments, null or {}
	lines    map[string]int  // by key path
	nulls    map[string]bool // key paths whose value is null
	problems remarks
	warnings remarks
	restarts bool // an option has another value, which needs a restart
	nodes    int
	keys     map[reflect.Type]string // of blocks, for messages
	flags    *pflag.FlagSet          // of the command; nil for none
	// malformed are the problems found during decoding.
	malformed []Remark
}

// decode reads a file as NVIDIA's device plugin does, YAML or JSON, with keys in any case.
// Unlike NVIDIA's plugin, decode finds all mistakes, not only the first, and also unknown
// keys. An empty file is an empty Config.
func decode(data []byte) *document {
	d := &document{lines: map[string]int{}, nulls: map[string]bool{}, keys: map[reflect.Type]string{}}
	top, err := single(yaml.NewDecoder(bytes.NewReader(data)))
	switch {
	case err != nil:
		d.problem("file", 0, strings.TrimPrefix(err.Error(), "yaml: "))
	case isNothing(top):
		d.empty = true
	case containsItself(top, map[*yaml.Node]bool{}):
		d.problem("file", 0, "has an anchor that contains itself")
	default:
		if line, text := otherFile(top); text != "" {
			d.problem("file", line, text)
			break
		}
		d.value(top, reflect.ValueOf(&d.config).Elem(), "")
	}
	if d.nodes > maxNodes {
		d.problem("file", 0, fmt.Sprintf("has more than %d values; aliases count as often as they are used", maxNodes))
	}
	d.malformed = slices.Clone(d.problems.kept)
	return d
}

// single returns the top node of the only document of a file; nil if there is none. Empty documents
// may follow, because templates leave separators behind.
func single(decoder *yaml.Decoder) (top *yaml.Node, err error) {
	for first := true; ; first = false {
		var root yaml.Node
		err := decoder.Decode(&root)
		switch {
		case errors.Is(err, io.EOF):
			return top, nil
		case err != nil && first:
			return nil, fmt.Errorf("is neither YAML nor JSON: %s", strings.TrimPrefix(err.Error(), "yaml: "))
		case err != nil:
			return nil, fmt.Errorf("has text after its document that is not YAML: %s",
				strings.TrimPrefix(err.Error(), "yaml: "))
		case first && len(root.Content) > 0:
			top = root.Content[0]
		case len(root.Content) > 0 && !isNothing(root.Content[0]):
			return nil, fmt.Errorf("has a second document at line %d; only one is allowed", root.Content[0].Line)
		}
	}
}

// otherFile describes a mapping that is not a configuration file, and names the right file; empty
// for a configuration file. Without this check, all keys would be ignored as unknown, and the
// defaults would apply.
func otherFile(top *yaml.Node) (line int, text string) {
	if top.Kind != yaml.MappingNode {
		return 0, ""
	}
	keys, known := map[string]*yaml.Node{}, false
	var first *yaml.Node
	for i := 0; i+1 < len(top.Content); i += 2 {
		key := top.Content[i]
		keys[key.Value] = top.Content[i+1]
		_, _, found := lookUp(reflect.ValueOf(&v1.Config{}).Elem(), key.Value)
		if known = known || found || key.Tag == "!!merge"; first == nil && !found {
			first = key
		}
	}
	switch kind, layouts := keys["kind"], keys["mig-configs"]; {
	case kind != nil && kind.Value == "ConfigMap":
		return kind.Line, "is a Kubernetes ConfigMap; give the text of one key of its data: kubectl get configmap " +
			"NAME -o jsonpath='{.data.KEY}'"
	case kind != nil:
		return kind.Line, fmt.Sprintf("is a Kubernetes object of the kind %.100q, and no configuration file",
			kind.Value)
	case keys["apiVersion"] != nil:
		return keys["apiVersion"].Line, "is a Kubernetes object, and no configuration file"
	case layouts != nil:
		return layouts.Line, "has the MIG layouts of mig-parted (mig-configs), and is no configuration file; name " +
			"it with mig.configFile"
	case !known:
		return first.Line, fmt.Sprintf("has no key of a configuration file, but %.100q; known keys: %s", first.Value,
			(&document{keys: map[reflect.Type]string{}}).knownKeys(reflect.TypeFor[v1.Config]()))
	}
	return 0, ""
}

// isNothing reports whether a document is empty.
func isNothing(top *yaml.Node) bool {
	return top == nil || top.Tag == "!!null" || top.Kind == yaml.MappingNode && len(top.Content) == 0
}

// containsItself reports whether following aliases leads from a node to itself. The nodes on the
// current path are open.
func containsItself(node *yaml.Node, open map[*yaml.Node]bool) bool {
	if isOpen, seen := open[node]; seen {
		return isOpen
	}
	open[node] = true
	if node.Alias != nil && containsItself(node.Alias, open) {
		return true
	}
	for _, child := range node.Content {
		if containsItself(child, open) {
			return true
		}
	}
	open[node] = false
	return false
}

func (d *document) problem(where string, line int, text string) {
	d.problems.add(Remark{Where: where, Line: line, Text: text})
}

// line returns the line of a key, or of the nearest enclosing block in the file.
func (d *document) line(path string) int {
	for path != "" {
		if line, found := d.lines[path]; found {
			return line
		}
		path = path[:max(0, strings.LastIndexAny(path, ".["))]
	}
	return 0
}

// value decodes a node into a field of the schema.
func (d *document) value(node *yaml.Node, into reflect.Value, path string) {
	if d.nodes++; d.nodes > maxNodes {
		return
	}
	d.lines[path] = node.Line
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	if d.nulls[path] = node.Tag == "!!null"; d.nulls[path] {
		return
	}
	if into.Kind() == reflect.Pointer {
		before := d.problems.count()
		pointed := reflect.New(into.Type().Elem())
		d.value(node, pointed.Elem(), path)
		if d.problems.count() == before || pointed.Elem().Kind() == reflect.Struct && !isSpecial(pointed) {
			into.Set(pointed) // invalid values count as absent
		}
		return
	}
	if special, ok := into.Addr().Interface().(json.Unmarshaler); ok {
		d.special(node, special, path)
		return
	}
	switch into.Kind() {
	case reflect.Struct:
		d.mapping(node, into, path)
	case reflect.Slice:
		d.sequence(node, into, path)
	default:
		d.scalar(node, into, path)
	}
}

// isSpecial reports whether a pointer's type decodes itself.
func isSpecial(pointer reflect.Value) bool {
	_, special := pointer.Interface().(json.Unmarshaler)
	return special
}

// special decodes a node into a type that decodes itself.
func (d *document) special(node *yaml.Node, into json.Unmarshaler, path string) {
	if !d.affords(node) {
		return
	}
	var value any
	err := node.Decode(&value)
	if err == nil {
		data, noJSON := json.Marshal(value)
		if noJSON != nil {
			data = []byte("{}") // no type accepts this form: the type's error lists its forms
		}
		err = into.UnmarshalJSON(data)
	}
	if err != nil {
		d.problem(path, node.Line, err.Error())
	}
}

// affords counts a node with its contents, and reports whether the sum is still within maxNodes.
func (d *document) affords(node *yaml.Node) bool {
	if d.nodes++; d.nodes > maxNodes {
		return false
	}
	if node.Alias != nil {
		return d.affords(node.Alias)
	}
	return !slices.ContainsFunc(node.Content, func(n *yaml.Node) bool { return !d.affords(n) })
}

func (d *document) mapping(node *yaml.Node, into reflect.Value, path string) {
	d.entries(node, into, path, map[string]string{})
}

// entries decodes the keys of a mapping, and of mappings merged into it, in the order of the file:
// a value replaces an earlier one completely. Spellings are the keys so far, by the key of the
// schema.
func (d *document) entries(node *yaml.Node, into reflect.Value, path string, spellings map[string]string) {
	if node.Kind != yaml.MappingNode {
		d.problem(cmp.Or(path, "file"), node.Line, "must be a mapping with the keys "+d.knownKeys(into.Type()))
		return
	}
	given := map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		if d.nodes++; d.nodes > maxNodes {
			return
		}
		key, value := node.Content[i], node.Content[i+1]
		if key.Tag == "!!merge" {
			d.merge(value, into, path, spellings)
			continue
		}
		field, name, found := lookUp(into, key.Value)
		where := join(path, key.Value)
		if !found {
			d.warn(where, key.Line, "unknown key, ignored; known keys: "+d.knownKeys(into.Type()))
			continue
		}
		if name != key.Value {
			d.warn(where, key.Line, "is read as "+name)
		}
		if before, known := spellings[name]; known && before != key.Value {
			// NVIDIA's plugin uses the alphabetical order of the spellings.
			d.problem(where, key.Line, "is also written as "+before+"; write the key in one way")
			continue
		}
		if given[name] {
			d.warn(where, key.Line, "is set more than once; the last value counts")
		}
		given[name], spellings[name] = true, key.Value
		field.SetZero()
		d.value(value, field, join(path, name))
	}
}

// merge decodes the mappings of YAML's key "<<".
func (d *document) merge(node *yaml.Node, into reflect.Value, path string, spellings map[string]string) {
	if d.nodes++; d.nodes > maxNodes {
		return
	}
	for node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	switch node.Kind {
	case yaml.MappingNode:
		d.entries(node, into, path, spellings)
	case yaml.SequenceNode:
		for _, item := range slices.Backward(node.Content) { // the first counts
			d.merge(item, into, path, spellings)
		}
	default:
		d.problem(cmp.Or(path, "file"), node.Line, "<< must refer to a mapping")
	}
}

func (d *document) sequence(node *yaml.Node, into reflect.Value, path string) {
	if node.Kind != yaml.SequenceNode {
		d.problem(path, node.Line, "must be a list")
		return
	}
	into.Set(reflect.MakeSlice(into.Type(), len(node.Content), len(node.Content)))
	for i, item := range node.Content {
		d.value(item, into.Index(i), path+"["+strconv.Itoa(i)+"]")
	}
}

func (d *document) scalar(node *yaml.Node, into reflect.Value, path string) {
	wanted := map[reflect.Kind]string{reflect.Bool: "true or false", reflect.Int: "a whole number",
		reflect.String: "a string"}[into.Kind()]
	if wanted == "" {
		panic(fmt.Sprintf("the schema has a field of kind %s at %s, which cannot be decoded", into.Kind(), path))
	}
	if node.Kind != yaml.ScalarNode {
		d.problem(path, node.Line, "must be "+wanted)
		return
	}
	if into.Kind() == reflect.String {
		if !isText(node, strings.HasSuffix(path, "]")) {
			d.problem(path, node.Line, fmt.Sprintf("must be a string, not %s; put it in quotes", node.Value))
			return
		}
		into.SetString(node.Value)
		return
	}
	if node.Tag == "!!str" && node.Style != 0 || isFraction(node) || node.Decode(into.Addr().Interface()) != nil {
		d.problem(path, node.Line, fmt.Sprintf("must be %s, not %q", wanted, node.Value))
	}
}

// isText reports whether a node is a string. An item of a list may also be a whole number, such as
// an index, if all versions of YAML agree on it: 00 may mean 0, and y true.
func isText(node *yaml.Node, item bool) bool {
	switch node.Tag {
	case "!!str", "!!timestamp":
		plain := item && node.Style == 0
		return !plain || !slices.Contains([]string{"y", "n", "yes", "no", "on", "off"}, strings.ToLower(node.Value))
	case "!!int":
		number, err := strconv.Atoi(node.Value)
		return item && err == nil && strconv.Itoa(number) == node.Value
	}
	return false
}

// isFraction reports whether a node is a fractional number. The decoder would truncate it.
func isFraction(node *yaml.Node) bool {
	var number float64
	return node.Tag == "!!float" && node.Decode(&number) == nil && number != math.Trunc(number)
}

func (d *document) warn(where string, line int, text string) {
	d.warnings.add(Remark{Where: where, Line: line, Text: text})
}

// lookUp returns the field of a struct for a key in any case, and the key of the schema.
func lookUp(into reflect.Value, key string) (field reflect.Value, name string, found bool) {
	for i := range into.NumField() {
		if name := tag(into.Type().Field(i)); strings.EqualFold(name, key) {
			return into.Field(i), name, true
		}
	}
	return reflect.Value{}, "", false
}

// knownKeys returns the keys of a block of the schema, for messages.
func (d *document) knownKeys(block reflect.Type) string {
	if d.keys[block] == "" {
		names := make([]string, block.NumField())
		for i := range names {
			names[i] = tag(block.Field(i))
		}
		d.keys[block] = strings.Join(names, ", ")
	}
	return d.keys[block]
}

// tag returns the key of a field in a file.
func tag(field reflect.StructField) string {
	name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
	return name
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
