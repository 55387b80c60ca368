// Package terminal has the printable forms of texts from other programs: names from a driver,
// errors of a daemon, contents of files. No form changes the terminal or resembles another line of
// the output.
package terminal

import (
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// IsControl reports whether a character changes the terminal or the order of other characters, or
// is not allowed in text.
func IsControl(r rune) bool {
	return unicode.IsControl(r) && r != '\n' && r != '\t' ||
		unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp) || r == '\ufffe' || r == '\uffff'
}

// Caret returns the form of a control character in sentences and tables: ^ and a letter.
func Caret(r rune) string {
	if r < utf8.RuneSelf {
		return "^" + string(r^0x40)
	}
	return Escape(r)
}

// Escape returns the form of a character in JSON, and in YAML between double quotes. The meaning
// stays the same.
func Escape(r rune) string { return fmt.Sprintf(`\u%04x`, r) }

// Printable returns a text without effect on the terminal: control characters are replaced by form,
// and bytes outside of any character by a number.
func Printable(text string, form func(rune) string) string {
	if utf8.ValidString(text) && !strings.ContainsFunc(text, IsControl) {
		return text
	}
	var b strings.Builder
	for text != "" {
		r, size := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case IsControl(r):
			b.WriteString(form(r))
		default:
			b.WriteRune(r)
		}
		text = text[size:]
	}
	return b.String()
}

// Line returns a text in a single line without effect on the terminal. A proper text stays
// unchanged.
func Line(text string) string {
	if strings.ContainsAny(text, "\n\t\r\v\f") {
		text = strings.Join(strings.Fields(text), " ")
	}
	return Printable(text, Caret)
}

// Clean replaces each string in the value of a pointer by its Line, except keys of maps. Unexported
// fields stay unchanged.
func Clean(pointer any) { clean(reflect.ValueOf(pointer).Elem()) }

func clean(v reflect.Value) {
	switch v.Kind() {
	case reflect.String:
		if v.CanSet() {
			v.SetString(Line(v.String()))
		}
	case reflect.Pointer:
		if !v.IsNil() {
			clean(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				clean(v.Field(i))
			}
		}
	case reflect.Slice, reflect.Array:
		for i := range v.Len() {
			clean(v.Index(i))
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			value := reflect.New(v.Type().Elem()).Elem()
			value.Set(v.MapIndex(key))
			clean(value)
			v.SetMapIndex(key, value)
		}
	default: // the value has no text
	}
}

// A Writer writes text without effect on the terminal. Input may end within a character. Close
// writes an incomplete character.
type Writer struct {
	// To receives the output.
	To io.Writer
	// Keep are the sequences of this program, such as colours. They stay unchanged.
	Keep []string

	pending []byte
}

// Write implements io.Writer.
func (w *Writer) Write(part []byte) (int, error) {
	text := slices.Concat(w.pending, part)
	end := len(text)
	for tail := 1; tail < utf8.UTFMax && tail <= len(text); tail++ {
		if b := text[len(text)-tail:]; utf8.RuneStart(b[0]) {
			if !utf8.FullRune(b) {
				end -= tail
			}
			break
		}
	}
	w.pending = text[end:]
	_, err := io.WriteString(w.To, w.printable(string(text[:end])))
	return len(part), err
}

// Close writes the bytes of an incomplete character.
func (w *Writer) Close() error {
	_, err := io.WriteString(w.To, w.printable(string(w.pending)))
	w.pending = nil
	return err
}

// printable returns a text without effect on the terminal, except for the sequences to keep.
func (w *Writer) printable(text string) string {
	first, which := len(text), ""
	for _, sequence := range w.Keep {
		if at := strings.Index(text, sequence); at >= 0 && at < first {
			first, which = at, sequence
		}
	}
	if which == "" {
		return Printable(text, Caret)
	}
	return Printable(text[:first], Caret) + which + w.printable(text[first+len(which):])
}
