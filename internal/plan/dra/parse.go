package dra

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/big"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// A configParser parses configuration and records its mistakes.
type configParser struct{ problems []string }

// maxShown limits a user's name or value in a problem, in bytes.
const maxShown = 100

// problem records a mistake in a field, in one printable line.
func (p *configParser) problem(path, format string, args ...any) {
	for i, a := range args {
		if text := fmt.Sprint(a); len(text) > maxShown {
			args[i] = text[:maxShown] + "..."
		}
	}
	if len(path) > maxShown {
		path = path[:maxShown] + "..."
	}
	text := path + ": " + fmt.Sprintf(format, args...)
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) }) {
		quoted := strconv.Quote(strings.ReplaceAll(text, `"`, "'"))
		text = quoted[1 : len(quoted)-1]
	}
	p.problems = append(p.problems, text)
}

// parse parses a JSON object.
func (p *configParser) parse(text []byte) (object, bool) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	value, err := p.value(decoder, "")
	if err == nil {
		if _, after := decoder.Token(); !errors.Is(after, io.EOF) {
			err = errors.New("more follows the object")
		}
	}
	fields, ok := value.(map[string]any)
	switch {
	case err != nil:
		p.problem("parameters", "are not JSON: %v", err)
	case !ok:
		p.problem("parameters", "are not an object")
	}
	return object{p, "", fields}, err == nil && ok
}

// value parses a value. encoding/json itself takes the last of several fields with one name.
func (p *configParser) value(decoder *json.Decoder, path string) (any, error) {
	token, err := decoder.Token()
	if err != nil {
		return nil, err
	}
	switch token {
	case json.Delim('{'):
		fields := map[string]any{}
		for decoder.More() {
			name, err := decoder.Token()
			if err != nil {
				return nil, err
			}
			key := name.(string) // the decoder has checked it
			if _, twice := fields[key]; twice {
				p.problem(path+key, "is given twice")
			}
			if fields[key], err = p.value(decoder, path+key+"."); err != nil {
				return nil, err
			}
		}
		_, err = decoder.Token()
		return fields, err
	case json.Delim('['):
		var list []any
		for decoder.More() {
			element, err := p.value(decoder, path)
			if err != nil {
				return nil, err
			}
			list = append(list, element)
		}
		_, err = decoder.Token()
		return list, err
	}
	return token, nil
}

// An object is a part of the configuration. Its fields are read one by one. A null field counts as
// absent.
type object struct {
	parser *configParser
	path   string // with a dot at its end
	fields map[string]any
}

// take returns a field and removes it.
func take[T any](o object, name, kind string) (value T, given bool) {
	field := o.fields[name]
	delete(o.fields, name)
	if field == nil {
		return value, false
	}
	value, ok := field.(T)
	if !ok {
		o.parser.problem(o.path+name, "is not %s", kind)
	}
	return value, ok
}

func (o object) text(name string) (string, bool) { return take[string](o, name, "a string") }

func (o object) truth(name string) bool {
	value, _ := take[bool](o, name, "true or false")
	return value
}

func (o object) number(name string) (string, bool) {
	value, given := take[json.Number](o, name, "a number")
	return value.String(), given
}

func (o object) object(name string) (object, bool) {
	fields, given := take[map[string]any](o, name, "an object")
	return object{o.parser, o.path + name + ".", fields}, given
}

// zero reads a list that is empty or contains only the number 0, and reports whether the number is
// there.
func (o object) zero(name string) bool {
	list, _ := take[[]any](o, name, "a list")
	if len(list) > 1 || len(list) == 1 && list[0] != json.Number("0") {
		o.parser.problem(o.path+name, "must be [] or [0]")
		return false
	}
	return len(list) == 1
}

// memory reads a quantity of at least 1 MiB, in bytes; 0 if absent.
func (o object) memory(name string) int64 {
	field := o.fields[name]
	delete(o.fields, name)
	if field == nil {
		return 0
	}
	bytes, ok := quantity(fmt.Sprint(field))
	switch {
	case !ok:
		o.parser.problem(o.path+name, "%v is not a quantity such as 10Gi", field)
	case bytes < 1<<20:
		o.parser.problem(o.path+name, "%v is less than 1Mi", field)
	}
	return bytes
}

// close records the unread fields as mistakes.
func (o object) close() {
	for name := range o.fields {
		o.parser.problem(o.path+name, "is not known")
	}
}

var (
	quantityForm = regexp.MustCompile(`^\+?((?:\d+\.?\d*|\.\d+))(?:([KMGTPE]i)|([numkMGTPE]?)|[eE]([+-]?\d{1,2}))$`)
	prefixes     = map[string]int64{"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
	binary       = map[string]uint{"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
)

// quantity returns the value of a Kubernetes quantity, rounded up to whole bytes; false for any
// other text, and for a negative quantity.
func quantity(text string) (int64, bool) {
	form := quantityForm.FindStringSubmatch(text)
	if form == nil {
		return 0, false
	}
	value, _ := new(big.Rat).SetString(form[1]) // the form has checked it
	exponent := prefixes[form[3]]
	if form[4] != "" {
		_, _ = fmt.Sscan(form[4], &exponent)
	}
	scale := new(big.Int).Exp(big.NewInt(10), big.NewInt(max(exponent, -exponent)), nil)
	if exponent < 0 {
		value.Quo(value, new(big.Rat).SetInt(scale))
	} else {
		value.Mul(value, new(big.Rat).SetInt(scale))
	}
	value.Mul(value, new(big.Rat).SetInt(new(big.Int).Lsh(big.NewInt(1), binary[form[2]])))
	whole, rest := new(big.Int).QuoRem(value.Num(), value.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		whole.Add(whole, big.NewInt(1))
	}
	if !whole.IsInt64() {
		return math.MaxInt64, true
	}
	return whole.Int64(), true
}
