package config_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/config"
)

// TestRemovedOptions: an option that was removed is refused as a flag, a variable and a key, also one that says what holds anyway. The text
// names the option, and what to use where there is something.
func TestRemovedOptions(t *testing.T) {
	t.Parallel()
	for _, o := range config.RemovedOptions() {
		keys := strings.Split(o.Key, ".")
		for name, given := range map[string][3]string{
			"--" + o.Flag: {"", "", "--" + o.Flag + "=false"},
			o.Env:         {"", o.Env + "=", ""},
			o.Key:         {strings.ToLower(strings.Join(keys, ": {")) + ": false" + strings.Repeat("}", len(keys)-1), "", ""},
		} {
			_, _, err := sources(t, given[1], given[2]).Resolve("", []byte(given[0]))
			var invalid *config.Invalid
			if !errors.As(err, &invalid) || len(invalid.Problems) != 1 || !strings.EqualFold(invalid.Problems[0].Where, name) || invalid.Problems[0].Text != o.Text {
				t.Errorf("%s: %v, want that it is refused: %s", name, err, o.Text)
			}
		}
	}
	for _, flag := range []string{"--wait-for-release", "--pod-events", "--mig-evict", "--mig-pause-clients"} { // without a value, as they could be given
		if _, _, err := sources(t, "", flag).Resolve("", nil); err == nil || !strings.Contains(err.Error(), flag+": was removed") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// TestRemovedOptionsNameWhatIsThere: what is to be used in place of a removed option exists.
func TestRemovedOptionsNameWhatIsThere(t *testing.T) {
	t.Parallel()
	known := map[string]bool{}
	for _, o := range config.Options() {
		for _, name := range append([]string{"--" + o.Flag, o.Key}, o.Env...) {
			known[name] = true
		}
	}
	for _, removed := range config.RemovedOptions() {
		found := 0
		for _, word := range strings.FieldsFunc(removed.Text, func(r rune) bool { return strings.ContainsRune(" ,;:=[]", r) }) {
			looksLikeOne := strings.HasPrefix(word, "--") || strings.Contains(word, "_") && strings.ToUpper(word) == word || strings.Contains(word, ".")
			if looksLikeOne && !known[word] {
				t.Errorf("--%s: names %s, which is no option", removed.Flag, word)
			}
			if looksLikeOne {
				found++
			}
		}
		if want := 3; found != want && !strings.Contains(removed.Text, "without a replacement") {
			t.Errorf("--%s: names %d of flag, variable and key: %s", removed.Flag, found, removed.Text)
		}
	}
}
