package slots

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A Window is a time of the week, in UTC, at which a change may begin.
type Window struct {
	text  string
	days  [7]bool // by time.Weekday, of the window's start
	start time.Duration
	// length is less than a day; a window may end on the next day.
	length time.Duration
}

// weekdays are the names of the days, by time.Weekday.
var weekdays = []string{"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"}

// ParseWindow reads a window: an optional day or range of days, then a start and an end in UTC, such
// as "22:00-04:00", "Sat 22:00-04:00" or "Mon-Fri 01:00-05:00". A window whose end is not after its
// start ends on the next day.
func ParseWindow(text string) (Window, error) {
	w := Window{text: text}
	days, times, hasDays := strings.Cut(text, " ")
	if !hasDays {
		days, times = "Sun-Sat", text
	}
	first, last, isRange := strings.Cut(days, "-")
	if !isRange {
		last = first
	}
	day, end := slices.Index(weekdays, first), slices.Index(weekdays, last)
	if day < 0 || end < 0 {
		return w, fmt.Errorf("%q has no days such as Sat or Mon-Fri", text)
	}
	for w.days[end] = true; day != end; day = (day + 1) % len(weekdays) {
		w.days[day] = true
	}
	start, stop, _ := strings.Cut(times, "-")
	from, err := time.Parse("15:04", start)
	to, stopErr := time.Parse("15:04", stop)
	if err != nil || stopErr != nil {
		return w, fmt.Errorf("%q has no times such as 22:00-04:00", text)
	}
	w.start = time.Duration(from.Hour())*time.Hour + time.Duration(from.Minute())*time.Minute
	w.length = to.Sub(from)
	if w.length <= 0 {
		w.length += 24 * time.Hour
	}
	return w, nil
}

// Has reports whether the window is open at a time.
func (w Window) Has(t time.Time) bool {
	t = t.UTC()
	midnight := time.Date(t.Year(), t.Month(), t.Day(), 0, 0, 0, 0, time.UTC)
	for _, day := range []time.Time{midnight, midnight.AddDate(0, 0, -1)} {
		since := t.Sub(day.Add(w.start))
		if w.days[day.Weekday()] && since >= 0 && since < w.length {
			return true
		}
	}
	return false
}

func (w Window) String() string { return w.text + " UTC" }

func windowTexts(windows []Window) string {
	texts := make([]string, len(windows))
	for i, w := range windows {
		texts[i] = w.String()
	}
	return strings.Join(texts, ", ")
}
