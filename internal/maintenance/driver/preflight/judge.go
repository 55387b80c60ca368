package preflight

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/diagnosis"
	"github.com/gpu-device-plugin/gpu-device-plugin/internal/base/wording"
)

// The verdicts on a node.
const (
	Ready   = "ready"
	InUse   = "in use"
	Blocked = "blocked"
)

// A Report is the result for a node.
type Report struct {
	// Verdict is Ready, InUse or Blocked. Summary is a sentence with the reason.
	Verdict string `json:"verdict"`
	Summary string `json:"summary"`
	// Driver is the version of the loaded driver; empty if none is loaded. Kernel is the running
	// kernel, and NextKernel that of the next boot; empty if unknown.
	Driver     string `json:"driver,omitempty"`
	Kernel     string `json:"kernel,omitempty"`
	NextKernel string `json:"nextKernel,omitempty"`
	// Target is the wanted driver; empty if the present driver is judged.
	Target string `json:"target,omitempty"`
	// Owners are what installed the present driver.
	Owners []string `json:"owners,omitempty"`
	// Findings have the worst finding first.
	Findings []diagnosis.Finding `json:"findings"`
	Holders  []Holder            `json:"holders"`
	// NotChecked counts the findings about facts that were not readable.
	NotChecked int `json:"notChecked"`
}

// The names of the checks.
const (
	checkKernel       = "kernel"
	checkModules      = "modules"
	checkSignatures   = "signatures"
	checkArchitecture = "architecture"
	checkCompanions   = "companions"
	checkNouveau      = "nouveau"
	checkMemory       = "memory"
	checkSpace        = "space"
	checkOwner        = "owner"
	checkHolders      = "holders"
)

// A check judges a part of the facts.
type check struct {
	name  string
	judge func(*Facts, *judgment)
}

// checks are all checks. The first four are about the modules at each boot.
var checks = []check{
	{checkKernel, kernels}, {checkModules, modules}, {checkSignatures, signatures}, {checkArchitecture, architectures},
	{checkCompanions, companions}, {checkNouveau, nouveau}, {checkMemory, memory}, {checkSpace, space},
	{checkOwner, owners}, {checkHolders, uses},
}

// Examine judges the facts. The worst findings come first.
func Examine(f Facts) Report {
	r := judgment{}
	r.judge(&f, checks)
	diagnosis.SortWorstFirst(r.findings)
	report := Report{
		Driver: f.Driver.Value.Version, Kernel: f.Kernel.Value, NextKernel: f.NextBoot.Value.Release,
		Findings: r.findings, Holders: r.holders,
	}
	if f.Target != nil {
		report.Target = f.Target.Name
	}
	for _, o := range f.Owners.Value {
		report.Owners = append(report.Owners, strings.TrimSpace(o.Kind+" "+o.Version))
	}
	report.summarize(&f)
	return report
}

// ExamineNextBoot judges whether the present driver works after the next restart of the node. It
// uses no facts about processes and pods.
func ExamineNextBoot(f Facts) []diagnosis.Finding {
	r := judgment{}
	r.judge(&f, checks[:4])
	diagnosis.SortWorstFirst(r.findings)
	return r.findings
}

// judgment collects findings and holders.
type judgment struct {
	check    string
	findings []diagnosis.Finding
	holders  []Holder
}

func (r *judgment) judge(f *Facts, some []check) {
	for _, c := range some {
		r.check = c.name
		c.judge(f, r)
	}
}

func (r *judgment) add(s diagnosis.Severity, code, message string, evidence []string, remedy ...string) {
	r.findings = append(r.findings, diagnosis.Finding{Check: r.check, Code: code, Severity: s, Message: message,
		Evidence: evidence,
		Remedy:   remedy})
}

// The functions below are called so often that their copies would make the program larger.

//go:noinline
func (r *judgment) ok(message string, evidence ...string) { r.add(diagnosis.OK, "", message, evidence) }

//go:noinline
func (r *judgment) skip(message string, remedy ...string) {
	r.add(diagnosis.NotChecked, "", message, nil, remedy...)
}

// hasProblem reports whether the check has a finding worse than info.
func (r *judgment) hasProblem() bool {
	return slices.ContainsFunc(r.findings,
		func(f diagnosis.Finding) bool { return f.Check == r.check && f.Severity > diagnosis.Info })
}

// require reports whether a fact is known, by why it is missing. It adds a finding for an unknown
// fact.
//
//go:noinline
func (r *judgment) require(missing string) bool {
	if missing != "" {
		r.skip(missing)
	}
	return missing == ""
}

// summarize sets the verdict, its sentence and the number of facts that are not known.
func (r *Report) summarize(f *Facts) {
	var errors []string
	warnings := 0
	for _, finding := range r.Findings {
		switch finding.Severity {
		case diagnosis.Error:
			errors = append(errors, finding.Message)
		case diagnosis.Warning:
			if finding.Check != checkHolders { // the verdict says that
				warnings++
			}
		case diagnosis.NotChecked:
			r.NotChecked++
		default:
		}
	}
	unnamed := slices.ContainsFunc(r.Findings,
		func(f diagnosis.Finding) bool { return f.Check == checkHolders && f.Severity == diagnosis.Warning })
	users := users(r.Holders)
	switch {
	case len(errors) > 0:
		r.Verdict, r.Summary = Blocked, "blocked: "+errors[0]
		if more := len(errors) - 1; more > 0 {
			r.Summary += fmt.Sprintf("; and %s", wording.Count(more, "more problem"))
		}
		if users != "" {
			r.Summary += "; in use by " + users
		}
	case users != "":
		r.Verdict, r.Summary = InUse, "in use by "+users
	case unnamed:
		r.Verdict, r.Summary = InUse, "in use by an unknown process or module"
	case f.Target != nil:
		r.Verdict, r.Summary = Ready, "ready for "+f.name()+": "+unused(f, "the present driver")
	default:
		r.Verdict, r.Summary = Ready, "ready: "+unused(f, f.name())
	}
	if warnings > 0 {
		r.Summary += "; " + wording.Count(warnings, "warning")
	}
	if r.NotChecked > 0 {
		r.Summary += fmt.Sprintf("; %s not made", wording.Count(r.NotChecked, "check"))
	}
}

// unused says that no user of a driver was found. Only the references of the modules prove that there
// is none.
func unused(f *Facts, driver string) string {
	if !f.Loaded.Known() {
		return "no user of " + driver + " was found"
	}
	return "nothing uses " + driver
}

// maxNamed is how many holders of a kind the sentence names.
const maxNamed = 3

// users returns the words for the holders: by kind, the first ones with their names.
func users(all []Holder) string {
	var parts []string
	for _, kind := range kinds {
		var names []string
		for _, h := range all {
			if h.Kind == kind {
				names = append(names, h.Name)
			}
		}
		if len(names) == 0 {
			continue
		}
		text := wording.Count(len(names), kind) + " (" + strings.Join(names[:min(len(names), maxNamed)], ", ")
		if len(names) > maxNamed {
			text += ", …"
		}
		parts = append(parts, text+")")
	}
	if len(parts) < 2 {
		return strings.Join(parts, "")
	}
	return strings.Join(parts[:len(parts)-1], ", ") + " and " + parts[len(parts)-1]
}
