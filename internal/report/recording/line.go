package recording

import (
	"encoding/json"
	"errors"
	"slices"
	"time"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/health"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/gpu/inventory"
)

// format is the version of the files. It rises when an older reader would play a file wrongly.
const format = 1

// A header is the first line of each file. With its header, a file can be played without the files
// before it.
type header struct {
	Format  int       `json:"format"`
	Program string    `json:"program"` // version of the program
	Life    time.Time `json:"life"`    // start of the recording, the same in all of its files
	Began   time.Time `json:"began"`   // start of the file
	BootID  string    `json:"bootID,omitempty"`
	// Policy is the health policy in force. Faults is the ledger of faults on disk.
	Policy health.Policy `json:"policy"`
	Faults string        `json:"faults,omitempty"`
}

// A line is a returned call of a session, an event, or a request to the Monitor.
type line struct {
	At   time.Time     `json:"at"`             // start of the call
	Took time.Duration `json:"took,omitempty"` // in ns
	Call string        `json:"call"`
	// Session is the number of the session in the recording. The first may have been opened before
	// the recording.
	Session int             `json:"session,omitempty"`
	GPU     string          `json:"gpu,omitempty"` // UUID
	Args    json.RawMessage `json:"args,omitempty"`
	// Value is the result of the call. Same is true if the value equals the value of the last call
	// with the same GPU and arguments.
	Value json.RawMessage `json:"value,omitempty"`
	Same  bool            `json:"same,omitempty"`
	Error *recordedError  `json:"error,omitempty"`
	// Dropped counts the missing lines before this line, because the disk was slow or full.
	Dropped int `json:"dropped,omitempty"`
}

func (l line) end() time.Time { return l.At.Add(l.Took) }

// renews reports whether the answer makes a Monitor open another session at once.
func (l line) renews() bool { return l.Error != nil && slices.Contains(l.Error.Is, "new-session") }

// key is equal for calls with the same name, GPU and arguments.
func (l line) key() string { return l.Call + " " + l.GPU + " " + string(l.Args) }

// The calls of a session by name, and the requests.
const (
	callOpen          = "Open"
	callScan          = "Scan"
	callRead          = "Read"
	callRetry         = "Retry"
	callSample        = "Sample"
	callProcesses     = "Processes"
	callMemoryLimit   = "MemoryLimit"
	callClean         = "Clean"
	callComputeMode   = "SetComputeMode"
	callPartitions    = "Partitions"
	callRepartition   = "Repartition"
	callRepartitioned = "Repartition ended"
	callEvent         = "Next"
	callHanging       = "Hanging"
	callUnwatched     = "Unwatched"
	callLost          = "LostByClose"
	callClose         = "Close"
	callEnd           = "end of the recording" // consequences of the calls before the end still play

	requestClear   = "request: clear"
	requestQuiesce = "request: quiesce"
	requestResume  = "request: resume"
	requestPolicy  = "request: policy"
)

// A recordedError is the error of a call.
type recordedError struct {
	Text  string           `json:"text"`
	Is    []string         `json:"is,omitempty"` // names of kinds
	Stall *inventory.Stall `json:"stall,omitempty"`
}

// kinds are the errors that a Monitor and others match.
var kinds = map[string]error{
	"no-driver": inventory.ErrNoDriver, "no-answer": inventory.ErrNoAnswer, "not-supported": inventory.ErrNotSupported,
	"no-permission": inventory.ErrNoPermission, "in-use": inventory.ErrInUse,
	"reset-required": inventory.ErrResetRequired,
	"new-session":    inventory.ErrNewSession, "driver-replaced": inventory.ErrDriverReplaced,
	"driver-mismatch": inventory.ErrDriverMismatch,
	"old-library":     inventory.ErrOldLibrary,
}

func failureOf(err error) *recordedError {
	if err == nil {
		return nil
	}
	f := &recordedError{Text: err.Error()}
	for name, kind := range kinds {
		if errors.Is(err, kind) {
			f.Is = append(f.Is, name)
		}
	}
	_ = errors.As(err, &f.Stall)
	return f
}

// A replayedError has the text and the kinds of the recorded error.
type replayedError struct {
	text string
	is   []error
}

func (e *replayedError) Error() string   { return e.text }
func (e *replayedError) Unwrap() []error { return e.is }

// err returns the error with its times moved by shift.
func (f *recordedError) err(shift time.Duration) error {
	if f == nil {
		return nil
	}
	e := &replayedError{text: f.Text}
	if f.Stall != nil {
		stall := *f.Stall
		stall.Call.Since = stall.Call.Since.Add(shift)
		e.is = append(e.is, &stall)
	}
	for _, name := range f.Is {
		if kind := kinds[name]; kind != nil {
			e.is = append(e.is, kind)
		}
	}
	return e
}
