package nodefiles

import (
	"context"
	"fmt"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
)

// ReadFact begins to read a fact, unless hidden says why it is not visible. The returned function waits for
// the fact until ctx ends. A call of from that does not return keeps its goroutine; its result is
// discarded.
func ReadFact[T any](ctx context.Context, fact *diagnosis.Fact[T], what, hidden string,
	from func() (T, error)) (wait func()) {
	if fact.Missing = hidden; hidden != "" {
		return func() {}
	}
	return begin(ctx, &fact.Missing, &fact.Hung, what, func() (func(), error) {
		value, err := from()
		return func() { fact.Value = value }, err
	})
}

// begin calls from, which returns how to keep its result. Only ReadFact depends on the type of the fact,
// because the program has a copy of it for each type.
func begin(ctx context.Context, missing *string, hung *bool, what string,
	from func() (keep func(), err error)) (wait func()) {
	type result struct {
		keep func()
		err  error
	}
	done := make(chan result, 1)
	go func() {
		keep, err := from()
		done <- result{keep, err}
	}()
	return func() {
		var r result
		select {
		case r = <-done:
		case <-ctx.Done():
			select {
			case r = <-done: // returned during the wait for others
			default:
				*missing, *hung = fmt.Sprintf("Reading %s did not return in time: the node is very busy, or the "+
					"driver or a file system hangs", what), true
				return
			}
		}
		if r.keep(); r.err != nil {
			*missing = fmt.Sprintf("Cannot read %s: %v", what, r.err)
		}
	}
}
