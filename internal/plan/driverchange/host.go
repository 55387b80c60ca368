package driverchange

import (
	"time"
)

// A Folder is a driver folder on the node or among the sources.
type Folder struct {
	Digest  string   `json:"digest"`
	Version string   `json:"version"`
	Kernels []string `json:"kernels,omitempty"` // releases for which the folder has modules
	IsHere  bool     `json:"isHere"`            // it is in the directory, whole
	Percent int      `json:"percent,omitempty"` // copied, by bytes; 0 if the folder is not being copied
	// Archives are the SHA-256 digests of the archives that were unpacked to the folder, in hexadecimal.
	Archives []string `json:"archives,omitempty"`
	// Source is the path of the folder among the sources, such as an image volume; empty if the folder
	// is not there.
	Source string `json:"source,omitempty"`
	// Problem says why the folder cannot be loaded on this node: no modules for the running kernel,
	// modules that the kernel refuses, or a driver that does not support the node's GPUs; empty if it
	// can.
	Problem string `json:"problem,omitempty"`
}

// A Download is an archive that is being downloaded and unpacked.
type Download struct {
	Archive string `json:"archive"` // SHA-256 digest, in hexadecimal
	Source  string `json:"source"`  // URL without its query
	// Done is the number of bytes that are there, and Total those of the archive; 0 if it is not known.
	Done    int64     `json:"done"`
	Total   int64     `json:"total,omitempty"`
	Percent int       `json:"percent"` // of the download and the unpacking
	Since   time.Time `json:"since"`   // the first call
	// Problem is why the last try has failed; empty while the download makes progress. IsFinal is true if
	// somebody has to do something, and false if another try may work.
	Problem string `json:"problem,omitempty"`
	IsFinal bool   `json:"isFinal,omitempty"`
}

// A Phase is the progress of a change at gpu-driver, as package driverapi has it.
type Phase string

// The phases.
const (
	PhasePlacing   Phase = "placing"
	PhaseUnloading Phase = "unloading"
	PhaseLoading   Phase = "loading"
	PhaseUnproven  Phase = "unproven"
	PhaseReverting Phase = "reverting"
	PhaseNextBoot  Phase = "next-boot"
	PhaseFailed    Phase = "failed"
)

// A Change is a change in the journal of gpu-driver.
type Change struct {
	To      string // digest
	Phase   Phase
	Percent int
	Since   time.Time // start of the phase
	Reason  string
	// Holders are the users of the driver for which PhaseUnloading waits, in words.
	Holders []string
}

// A Host is the status of gpu-driver on the node.
type Host struct {
	// LoadedVersion is the version of the loaded driver, and LoadedDigest the folder that it is from;
	// empty for none. Current is the folder that the next boot loads.
	LoadedVersion, LoadedDigest, Current string
	Folders                              []Folder
	Refusals                             []string  // why the driver of this node must not be changed
	Change                               *Change   // nil for none
	Download                             *Download // nil for none
}
