package v1

import (
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"time"
)

// StringList is a list of strings, also written as one string with commas.
type StringList []string

// UnmarshalJSON accepts a string or a list of strings.
func (l *StringList) UnmarshalJSON(data []byte) error {
	var text string
	if err := json.Unmarshal(data, &text); err == nil {
		*l = strings.Split(text, ",")
		return nil
	}
	var list []string
	if err := json.Unmarshal(data, &list); err != nil {
		return errors.New("must be a string or a list of strings")
	}
	*l = list
	return nil
}

// Word is a string. The words true and false can also be written without quotes.
type Word string

// UnmarshalJSON accepts a string, true and false.
func (w *Word) UnmarshalJSON(data []byte) error {
	var truth bool
	if err := json.Unmarshal(data, &truth); err == nil {
		*w = Word(strconv.FormatBool(truth))
		return nil
	}
	var text string
	if err := json.Unmarshal(data, &text); err != nil {
		return errors.New("must be true, false or a string")
	}
	*w = Word(text)
	return nil
}

// Interval is a Duration, or "infinite".
type Interval string

// UnmarshalJSON accepts the forms of Duration, and "infinite".
func (i *Interval) UnmarshalJSON(data []byte) error {
	var text string
	if err := json.Unmarshal(data, &text); err == nil && text == "infinite" {
		*i = Interval(text)
		return nil
	}
	var d Duration
	if err := d.UnmarshalJSON(data); err != nil {
		return errors.New(`must be "infinite" or a duration with a unit, such as "60s" or "1h30m"`)
	}
	*i = Interval(time.Duration(d).String())
	return nil
}

// Duration is a duration in Go's form: "90s", "1h30m".
type Duration time.Duration

// UnmarshalJSON accepts the strings of time.ParseDuration. A number without a unit is an
// error: NVIDIA's programs read it as nanoseconds.
func (d *Duration) UnmarshalJSON(data []byte) error {
	var text string
	err := json.Unmarshal(data, &text)
	parsed, invalid := time.ParseDuration(text)
	if err != nil || invalid != nil {
		return errors.New(`must be a duration with a unit, such as "60s" or "1h30m"`)
	}
	*d = Duration(parsed)
	return nil
}

// MarshalJSON writes the duration as a string.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// DeviceSet is a choice among the devices of a resource: "all", a count, or a list.
// Exactly one field is set.
type DeviceSet struct {
	// All is true for every device.
	All bool
	// Count is the number of devices, from the lowest index.
	Count int
	// List has indices of GPUs "i" and of MIG devices "i:j", and UUIDs of both. An empty
	// list has no meaning.
	List []string
}

var errDeviceSet = errors.New(`must be "all", a number of devices greater than 0, ` +
	`or a list of GPU indices (0), MIG indices ("0:1") and UUIDs`)

// UnmarshalJSON accepts the string "all", a positive number, or a list of strings and
// numbers; a number in a list is a GPU's index.
func (s *DeviceSet) UnmarshalJSON(data []byte) error {
	var value any
	if err := json.Unmarshal(data, &value); err != nil {
		return errDeviceSet
	}
	var set DeviceSet
	switch value := value.(type) {
	case string:
		set.All = value == "all"
	case float64:
		set.Count = int(value)
		if float64(set.Count) != value {
			return errDeviceSet
		}
	case []any:
		set.List = []string{}
		for _, item := range value {
			switch item := item.(type) {
			case string:
				set.List = append(set.List, item)
			case float64:
				if item != float64(int(item)) {
					return errDeviceSet
				}
				set.List = append(set.List, strconv.Itoa(int(item)))
			default:
				return errDeviceSet
			}
		}
	}
	if !set.All && set.Count <= 0 && set.List == nil {
		return errDeviceSet
	}
	*s = set
	return nil
}

// MarshalJSON writes the form that UnmarshalJSON reads.
func (s DeviceSet) MarshalJSON() ([]byte, error) {
	if s.All {
		return json.Marshal("all")
	}
	if s.List != nil {
		return json.Marshal(s.List)
	}
	return json.Marshal(s.Count)
}
