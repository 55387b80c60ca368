package view

import (
	"slices"
	"time"

	eventsv1 "k8s.io/api/events/v1"
)

// Newest returns the Events sorted by time, newest first.
func Newest(events []eventsv1.Event) []eventsv1.Event {
	all := slices.Clone(events)
	slices.SortStableFunc(all, func(a, b eventsv1.Event) int { return EventTime(b).Compare(EventTime(a)) })
	return all
}

// EventTime returns the time of the last occurrence of an Event.
func EventTime(e eventsv1.Event) time.Time {
	last := e.EventTime.Time
	if e.Series != nil && e.Series.LastObservedTime.After(last) {
		last = e.Series.LastObservedTime.Time
	}
	if e.DeprecatedLastTimestamp.After(last) {
		last = e.DeprecatedLastTimestamp.Time
	}
	return last
}
